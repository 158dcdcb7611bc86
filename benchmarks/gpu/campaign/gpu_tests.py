"""The tests that need a GPU, by pytest, if it is installed.

Keys: `passed`, `failed`, `skipped`, or `not_run` with the reason; `output` ends with the summary.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.gpu.campaign.target import Target

ROOT: Final = Path(__file__).parents[3]

NEEDED: Final = ("pytest", "pytest_asyncio", "pytest_timeout")


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Run the tests marked `gpu`."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    files = [
        str(file)
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        if "mark.gpu" in file.read_text()
    ]
    if missing or not files or not target.is_gpu:
        reason = "no GPU" if not target.is_gpu else f"{', '.join(missing) or 'tests'} not installed"
        yield "not_run", reason
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).strip().splitlines()
    yield "output", "\n".join(lines[-40:])
    summary = lines[-1] if lines else ""
    for outcome in ("passed", "failed", "skipped", "error"):
        counted = re.search(rf"(\d+) {outcome}", summary)
        yield outcome, int(counted[1]) if counted else 0
