"""Trials in a process of their own: what may hang, crash, or leave something open."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

SHOWN: Final = 300
"""Characters of a failed trial's last words that a finding quotes."""

_running: Final[set[subprocess.Popen[str]]] = set()


class Trial(NamedTuple):
    """The end of a trial."""

    worked: bool
    words: str
    """Its output, or the reason why it failed."""

    is_late: bool = False
    """Whether it was killed at its time limit: it hangs, or the machine is busy."""

    lacks_instructions: bool = False
    """Whether it used instructions that this CPU does not have (SIGILL)."""


def try_apart(arguments: Sequence[str], seconds: float) -> Trial:
    """Run this Python with `arguments` in a process group of its own; kill the group at the time
    limit.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        encoding="utf-8",
    )
    _running.add(process)
    try:
        printed, complained = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Trial(False, f"no answer within {seconds:.0f} s", is_late=True)
    finally:
        _kill(process)
        process.communicate()
        _running.discard(process)
    if process.returncode == 0:
        return Trial(True, printed.strip())
    if process.returncode == -signal.SIGILL:
        return Trial(
            False,
            "killed by SIGILL: it uses instructions that this CPU does not have",
            lacks_instructions=True,
        )
    if process.returncode < 0:
        return Trial(False, f"killed by {signal.Signals(-process.returncode).name}")
    lines = [line for line in complained.strip().splitlines() if line.strip()]
    return Trial(False, (lines[-1] if lines else f"exit status {process.returncode}")[:SHOWN])


def end_trials() -> None:
    """Kill the trials that still run."""
    for process in tuple(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    # forks of the trial too: one that hangs in OpenGL would stay for ever
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
