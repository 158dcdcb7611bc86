"""Configuration of simulator processes, with the timeouts that they learn from their earlier calls.

    timeout of a call = max(floor, factor * slowest call so far, per control step * control steps of the call)

`step_timeout_s` and `reset_timeout_s` have to suffice for the slowest simulator, and a step that
never returns would cost all of that time. A process that has answered often enough shows what it
needs. A timeout that fires may still be wrong, such as for a rare step that loads a new map, or if
the whole machine stood still. So it makes all timeouts of the pool four times as long, also those
of running calls, until they reach the configured ones: a repeated episode then gets through.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, Literal

import msgspec

from vla_rl.actors import ChildProcess, ForkServer
from vla_rl.actors.placement import FROZEN_AFTER_S, LEAST_FROZEN_AFTER_S
from vla_rl.env_workers.make_env import prepare_hook
from vla_rl.types import Config, EnvSpec, NonNegativeInt, PositiveFloat, PositiveInt
from vla_rl.util.rlimits import require_process_limits

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
        # A comparison, because `max` takes 0.1 us and this 0.01 us, at every control step.
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

    def record_duration(self, num_units: int, seconds: float) -> None:
        """Learn from a call of `num_units` that took `seconds` after the calls before it."""
        self._num_seen += 1
        # Two halves instead of a window: the slowest of the last 200 to 400 calls, without storing
        # them.
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
                self._describe_cause(),
            )

    def record_overdue(self, num_units: int) -> str:
        """Record that a call was not answered in time.

        Return the reason for that timeout, for the error message.
        """
        why = self._describe_cause()
        self._leniency.note_overdue()
        return why

    def _describe_cause(self) -> str:
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
        # Bound methods as attributes: the runtime asks for the limit at every control step, and
        # methods in between would be a further call each time.
        self.limit_s, self.record_duration, self.record_overdue = (
            timeout.timeout_s,
            timeout.record_duration,
            timeout.record_overdue,
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


PROCESS_INDEX_VARIABLE = "VLA_RL_PROCESS_INDEX"
"""Set in each simulator process to its number in the pool, from which it picks its GPU."""


class SimulatorConfig(Config, frozen=True, kw_only=True):
    """Simulators of one pool, and the processes that they run in."""

    num_envs: PositiveInt = 1
    """Number of simulators, and so of episodes that run at the same time."""

    envs_per_process: PositiveInt = 1
    """Simulators per process. More than one pays off if a control step takes less than about
    a tenth of a millisecond: toys, control tasks, grid worlds. The simulators of a process run one
    at a time, and all end if one of them ends the process; so keep 1 for anything that renders or
    computes physics."""

    start: Literal["fork", "spawn"] = "fork"
    """How processes start. "fork": copies of one clean process that has imported the environments
    and built what they can share; they start in milliseconds and share its memory. "spawn": fresh
    interpreters, for environments whose modules start threads or open a display when they are
    imported."""

    python: str | None = None
    """Interpreter of the simulator processes, such as `/venvs/libero_plus/bin/python`; None for
    this one. It needs vla_rl, msgspec, pyzmq, uvloop, numpy, gymnasium and the environment's own
    package."""

    step_timeout_s: PositiveFloat = 60.0
    """Timeout of one message in seconds (> 0): a control step, a whole chunk, or in a vector env a
    control step of all simulators of a process. A simulator that takes longer is killed as frozen,
    with its process. Waiting behind others in the process does not count."""

    reset_timeout_s: PositiveFloat = 180.0
    """Timeout for building an environment and for a reset in seconds (> 0), as `step_timeout_s`."""

    learned_timeout_factor: Annotated[float, msgspec.Meta(ge=1)] | None = 20.0
    """A control step (or reset) that takes this many times as long as the slowest recent one of its
    process counts as frozen, even before `step_timeout_s` (`reset_timeout_s`). Learned from 50
    steps (5 resets) of the process; if such a timeout fires, all others of the pool become four
    times as long. None uses only the two fixed timeouts."""

    learned_timeout_floor_s: PositiveFloat = 5.0
    """Smallest learned timeout in seconds (> 0). Raise it for simulators that are slow at times."""

    # A process is looked at more than once within a second: a single look may fall into a pause of a
    # busy machine.
    frozen_after_s: Annotated[float, msgspec.Meta(ge=LEAST_FROZEN_AFTER_S)] | None = FROZEN_AFTER_S
    """A process that a signal has stopped (SIGSTOP) for this many seconds is killed as
    frozen; so is one that sleeps for five times as long without letting any of its threads run.
    None leaves both cases to the timeouts: for processes that you stop yourself."""

    start_timeout_s: PositiveFloat = 120.0
    """Time in seconds within which a process must be up (> 0); after that it is killed."""

    prepare_timeout_s: PositiveFloat = 600.0
    """Time in seconds (> 0) within which the process that is forked must be ready; it builds all
    environments of the run."""

    concurrent_starts: PositiveInt = 4
    """Number of processes that start at the same time; the others wait."""

    recycle_after_episodes: PositiveInt | None = None
    """Episodes of a process, over all its simulators, after which it is replaced; None for never.
    For leaking simulators."""

    rss_limit_mb: PositiveInt | None = None
    """Largest memory of a process at the end of an episode (MiB, resident and not shared with other
    processes); above it the process is replaced. None sets no limit."""

    max_restarts: NonNegativeInt = 10
    """Deaths and freezes in the whole pool within `restart_window_s` that are tolerated; one more
    ends the run."""

    restart_window_s: PositiveFloat = 60.0
    """Length of the window of `max_restarts` in seconds (> 0)."""

    environment: dict[str, str] = msgspec.field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
    """Environment variables set in each simulator process, such as MUJOCO_GL."""

    render_devices: tuple[NonNegativeInt, ...] = ()
    """EGL devices that render, assigned to the processes in turn as MUJOCO_EGL_DEVICE_ID. Empty
    assigns all GPUs that EGL lists, for environments that choose by
    `vla_rl.envs.mujoco.loading`."""

    def split_envs(self, num_envs: int) -> list[int]:
        """Return the number of simulators in each process, `num_envs` in all."""
        per_process = self.envs_per_process
        return [min(per_process, num_envs - first) for first in range(0, num_envs, per_process)]

    def require_limits(self, num_processes: int) -> None:
        """Check that this process's limits allow this many simulator processes.

        Raises: ConfigError; see `require_process_limits`.
        """
        remedy = "take fewer processes (num_envs, or more envs_per_process)"
        require_process_limits(
            num_processes,
            num_extra=min(num_processes, self.concurrent_starts),
            shared_bytes=self.get_placement(0).arena_bytes,
            remedy=remedy,
        )

    def make_leniency(self) -> Leniency:
        """Return the leniency of the learned timeouts of one pool."""
        return Leniency(self.learned_timeout_factor, self.learned_timeout_floor_s)

    def get_environment(self, index: int) -> dict[str, str]:
        """Return the environment variables of simulator process number `index`."""
        # By number and not by pid: a successor draws on the same GPU as the process that it
        # replaces, so that replacements do not move the load.
        own = {**self.environment, PROCESS_INDEX_VARIABLE: str(index)}
        if self.render_devices:
            own["MUJOCO_EGL_DEVICE_ID"] = str(self.render_devices[index % len(self.render_devices)])
        return own

    def get_placement(self, index: int, specs: Iterable[EnvSpec] = ()) -> ChildProcess:
        """Return the placement of simulator process number `index`.

        `specs` are its environments, as far as known.
        """
        server = None
        if self.start == "fork":
            # the imports of a simulator take seconds, a fork of a process that has them milliseconds
            server = ForkServer(
                imports=("vla_rl.env_workers.worker",),
                prepare=(prepare_hook(specs),),
                env=self.environment,
                prepare_timeout_s=self.prepare_timeout_s,
            )
        return ChildProcess(
            env=self.get_environment(index),
            python=self.python,
            fork_from=server,
            frozen_after_s=self.frozen_after_s,
        )
