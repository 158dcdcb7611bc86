"""Read the state of another process from /proc, without asking the process.

Each look reads one file, and one more for each thread of a process that seems to sleep (about 15 µs
each). So only a process that missed a beat is looked at.
"""

from collections.abc import Iterable
from pathlib import Path

from vla_rl.actors.heartbeat import ProcessState

# after the name, which may hold spaces and parentheses itself
_STATE, _USER_TIME, _SYSTEM_TIME = 0, 11, 12
_AT_WORK = ("R", "D")
"""Running or waiting for a core; waiting for a disk or a driver, which no signal interrupts."""
_ENDED = ("Z", "X")
_IN_WORDS = {
    "R": "running",
    "S": "asleep",
    "D": "in a call of a disk or driver that no signal interrupts",
    "Z": "dead",
    "X": "dead",
}


class ProcessEye:
    """Looks at one process repeatedly; remembers how much CPU time it had used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._folder = Path(f"/proc/{pid}")
        self._cpu_ticks = -1

    def look(self) -> ProcessState:
        """Read its state.

        A process that has ended, or cannot be read, counts as running: its end is noticed
        elsewhere.
        """
        try:
            return self._look()
        except (OSError, IndexError, ValueError):  # its files are gone, or empty while it ends
            return ProcessState.RUNNING

    def _look(self) -> ProcessState:
        state, cpu_ticks = _read_stat(self._folder / "stat")
        if state in ("T", "t"):
            return (
                ProcessState.TRACED if state == "t" or self._is_traced() else ProcessState.STOPPED
            )
        has_worked, self._cpu_ticks = cpu_ticks > self._cpu_ticks, cpu_ticks
        if (
            has_worked
            or state in _AT_WORK + _ENDED
            or any(thread in _AT_WORK for thread in self._states_of_threads())
        ):
            return ProcessState.RUNNING
        return ProcessState.TRACED if self._is_traced() else ProcessState.ASLEEP

    def _states_of_threads(self) -> list[str]:
        return [_read_stat(task / "stat")[0] for task in (self._folder / "task").iterdir()]

    def _is_traced(self) -> bool:
        return _is_traced(self._folder)


def find_stopped(pids: Iterable[int]) -> int | None:
    """Return the first process that a signal such as SIGSTOP has stopped.

    For processes that do not beat.

    Return None if there is none: a process that is traced, or has ended, is not stopped. Reads one
    file per process.
    """
    return next((pid for pid in pids if _is_stopped(pid)), None)


def describe_process(pid: int) -> str:
    """Return the state of a process in words, such as `stopped by a signal (SIGSTOP)`."""
    folder = Path(f"/proc/{pid}")
    try:
        state, _ = _read_stat(folder / "stat")
        if state in ("T", "t"):
            return "held by a debugger" if _is_traced(folder) else "stopped by a signal (SIGSTOP)"
    except (OSError, IndexError, ValueError):
        return "not there any more"
    return _IN_WORDS.get(state, f"in state {state}")


def _is_stopped(pid: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        return _read_stat(folder / "stat")[0] == "T" and not _is_traced(folder)
    except (OSError, IndexError, ValueError):  # it ends
        return False


def _is_traced(folder: Path) -> bool:
    status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    return not status.partition("TracerPid:")[2].lstrip().startswith("0")


def _read_stat(file: Path) -> tuple[str, int]:
    """Return the state, and the CPU time of all threads in clock ticks.

    Raises: OSError if it has ended.
    """
    with open(file, "rb") as opened:
        fields = opened.read().rpartition(b")")[2].split()
    return fields[_STATE].decode(), int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])
