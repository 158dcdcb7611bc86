"""Timeouts that a simulator process learns from its own earlier calls.

Plain classes with no task and no clock.

    timeout of a call = max(floor, factor * slowest call so far, per control step * control steps of the call)

`step_timeout_s` and `reset_timeout_s` have to suffice for the slowest simulator, and a step that
never returns would cost all of that time. A process that has answered often enough shows what it
needs. A timeout that fires may still be wrong, such as for a rare step that loads a new map, or if
the whole machine stood still. So it makes all timeouts of the pool four times as long, also those
of running calls, until they reach the configured ones: a repeated episode then gets through.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

ENOUGH_STEPS: Final = 50
ENOUGH_RESETS: Final = 5
"""Calls from which a timeout is learned; before that the configured one holds."""

REMEMBERED: Final = 200
"""The slowest of at least this many calls counts, so that the first ones, which compile code, do
not count for ever."""

_LONGER: Final = 4.0


class Leniency:
    """Factor and floor of the learned timeouts of one pool.

    Args:
        factor: see `SimulatorConfig.learned_timeout_factor`; None learns nothing.
        floor_s: see `SimulatorConfig.learned_timeout_floor_s`.
    """

    def __init__(self, factor: float | None, floor_s: float) -> None:
        self.factor, self.floor_s = factor, floor_s
        self._times = 1.0

    def timeout_s(self, slowest_s: float) -> float | None:
        """Return the longest time (s) for work that took at most `slowest_s` so far.

        None if nothing is learned.
        """
        if self.factor is None:
            return None
        timeout_s = self.factor * slowest_s
        return self._times * (timeout_s if timeout_s > self.floor_s else self.floor_s)

    def note_overdue(self) -> None:
        """Make all timeouts longer: one has fired, and may have been wrong."""
        # for all processes: what was slow for one, such as a new map, will be slow for the others
        self._times *= _LONGER

    def describe(self) -> str:
        """Describe how a timeout follows from the measurements."""
        longer = (
            f" {self._times:g} times that, as others have fired before;"
            if self._times > 1.0
            else ""
        )
        return (
            f"learned_timeout_factor is {self.factor:g}, learned_timeout_floor_s "
            f"{self.floor_s:g};{longer}"
        )


class LearnedTimeout:
    """Timeout of one kind of call to one process.

    Args:
        process: name of the process, for the log.
        unit: name of one unit of work, in the singular.
        enough: number of calls from which it learns.
        leniency: shared by all processes of a pool.
    """

    def __init__(self, process: str, unit: str, enough: int, leniency: Leniency) -> None:
        self._process, self._unit, self._enough, self._leniency = process, unit, enough, leniency
        self.forget()

    def forget(self) -> None:
        """Start again: the process runs another environment from now on."""
        self._num_seen = 0
        self._slowest_s = self._slowest_before_s = 0.0

    @property
    def slowest_s(self) -> float:
        """Longest time of one unit (s), in the last `REMEMBERED` calls or more."""
        return (
            self._slowest_s if self._slowest_s > self._slowest_before_s else self._slowest_before_s
        )

    def timeout_s(self, num_units: int) -> float | None:
        """Return the longest time (s) for a call of `num_units`.

        None if too few calls were seen, or learning is off.
        """
        return (
            None
            if self._num_seen < self._enough
            else self._leniency.timeout_s(self.slowest_s * num_units)
        )

    def note(self, num_units: int, seconds: float) -> None:
        """Learn from a call of `num_units` that took `seconds` after the calls before it."""
        self._num_seen += 1
        if self._num_seen % REMEMBERED == 0:
            self._slowest_before_s, self._slowest_s = self._slowest_s, 0.0
        if seconds > self._slowest_s * num_units:
            self._slowest_s = seconds / num_units
        if self._num_seen == self._enough and self._leniency.factor is not None:
            logger.info(
                "simulator %s: a %s may take %.4g s: %s.",
                self._process,
                self._unit,
                self.timeout_s(1),
                self._why(),
            )

    def note_overdue(self, num_units: int) -> str:
        """Record that a call was not answered in time.

        Return the reason for that timeout, for the error message.
        """
        why = self._why()
        self._leniency.note_overdue()
        return why

    def _why(self) -> str:
        return (
            f"{self._leniency.describe()} the slowest {self._unit} lately took "
            f"{self.slowest_s:.3g} s"
        )


class CallTimeout:
    """Learned timeout of one actor method. Implements `vla_rl.actors.CallLimit`.

    Args:
        timeout: shared by methods whose calls consist of the same units.
        num_units: returns the units of a call with these arguments.
    """

    def __init__(
        self, timeout: LearnedTimeout, num_units: Callable[[tuple[Any, ...]], int]
    ) -> None:
        self.num_units = num_units
        self.limit_s, self.note, self.note_overdue = (
            timeout.timeout_s,
            timeout.note,
            timeout.note_overdue,
        )


class LearnedTimeouts:
    """The learned timeouts of one process, by method of its `EnvWorker`."""

    def __init__(self, process: str, leniency: Leniency) -> None:
        self._step = LearnedTimeout(process, "control step", ENOUGH_STEPS, leniency)
        self._reset = LearnedTimeout(process, "reset", ENOUGH_RESETS, leniency)
        self.by_endpoint = {
            "step": CallTimeout(self._step, lambda args: 1),
            "step_all": CallTimeout(self._step, lambda args: max(1, len(args[0]))),
            "step_chunk": CallTimeout(self._step, lambda args: max(1, len(args[1]))),
            "reset": CallTimeout(self._reset, lambda args: 1),
        }

    def forget(self) -> None:
        """Start again: one of the environments in the process is another one from now on."""
        self._step.forget()
        self._reset.forget()
