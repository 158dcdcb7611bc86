"""The machine and the versions of a measurement, for the files that keep its raw data."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Final

from vla_rl.reporting.machine import git_commit

PACKAGES: Final = ("torch", "numpy", "mujoco", "robosuite", "hf-libero", "transformers")
"""Packages that the result of a run depends on most."""


def machine() -> str:
    """Describe this machine in a few words."""
    cpus = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (cpus.read_text().splitlines() if cpus.exists() else ())
        if line.startswith("model name")
    ]
    return f"{len(models)} cores of {models[0]}" if models else platform.platform()


def versions() -> dict[str, str]:
    """Return the versions of Python and `PACKAGES`, and the commit."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": git_commit(Path(__file__).parent) or "unknown",
    }
