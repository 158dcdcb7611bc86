"""Noticing that a process was stopped by a signal, without asking it: the kernel shows the state of every process."""

from typing import Final

from vla_rl.sandbox.descendants import state_of

LOOK_EVERY_S: Final = 0.5
_LOOKS: Final = 4
_LATE_AFTER_S: Final = 2 * LOOK_EVERY_S


class StoppedProcesses:
    """Decides from looks in a row whether processes are stopped for good; has no task and no clock of its own.

    It takes four looks, half a second apart. A look that comes late counts for nothing, and neither do those before it: what
    held up this process may have stopped the others too, and may let them go on a moment later.
    """

    def __init__(self) -> None:
        self._num_stopped, self._looked = 0, float("-inf")

    def look(self, pids: list[int], now: float) -> bool:
        """Look at the processes once more; True if one of them is stopped.

        Args:
            pids: the same at every look.
            now: time of this look, in seconds.
        """
        is_late = now - self._looked > _LATE_AFTER_S
        self._looked = now
        # "t", for a debugger, is not meant
        is_stopped = not is_late and any(state_of(pid) == "T" for pid in pids)
        self._num_stopped = self._num_stopped + 1 if is_stopped else 0
        return self._num_stopped >= _LOOKS
