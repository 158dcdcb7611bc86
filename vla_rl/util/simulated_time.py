"""An event loop whose clock jumps to the next timer, so that waiting takes no time.

Code that takes the time only from its loop (`asyncio.sleep`, `asyncio.timeout`, `loop.time()`) runs
unchanged, in the same order on every machine. Tests use it to simulate hours of scheduling, with
faults, in seconds. It has no I/O and no threads; if every task waits and no timer is set, it raises
an error instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingClock(selectors.SelectSelector):
    """Moves the clock forward by the time that the loop asks the operating system to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError(
                f"nothing will ever happen: at {self.now:.3f} s of simulated time every task "
                "waits and no timer is set"
            )
        if timeout > 0:
            self.now += timeout
        return []


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a clock that starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping_clock = _JumpingClock()
        super().__init__(self._jumping_clock)

    def time(self) -> float:
        """Return the seconds of simulated time since the loop was made."""
        return self._jumping_clock.now


def run_in_simulated_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end on a `SimulatedTimeLoop` and return its result, as `asyncio.run` would.

    Raises: RuntimeError if a point is reached at which every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(main)
