"""Configuration of simulators: how many run, and what happens to those that die, freeze or grow."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from vla_rl.actors import ChildProcess, ForkServer
from vla_rl.actors.placement import FROZEN_AFTER_S, LEAST_FROZEN_AFTER_S
from vla_rl.actors.room import require_room
from vla_rl.env_workers.learned_timeout import Leniency
from vla_rl.env_workers.preparation import prepare_hook
from vla_rl.types import Config, EnvSpec

PROCESS_INDEX_VARIABLE = "VLA_RL_PROCESS_INDEX"
"""Set in each simulator process to its number in the pool, from which it picks its GPU."""


class SimulatorConfig(Config, frozen=True, kw_only=True):
    """Simulators of one pool, and the processes that they run in."""

    num_envs: int = 1
    """Number of simulators, and so of episodes that run at the same time (>= 1)."""

    envs_per_process: int = 1
    """Simulators per process (>= 1). More than one pays off if a control step takes less than about
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

    step_timeout_s: float = 60.0
    """Timeout of one message in seconds (> 0): a control step, a whole chunk, or in a vector env a
    control step of all simulators of a process. A simulator that takes longer is killed as frozen,
    with its process. Waiting behind others in the process does not count."""

    reset_timeout_s: float = 180.0
    """Timeout for building an environment and for a reset in seconds (> 0), as `step_timeout_s`."""

    learned_timeout_factor: float | None = 20.0
    """A control step (or reset) that takes this many times as long as the slowest recent one of its
    process counts as frozen, even before `step_timeout_s` (`reset_timeout_s`). Learned from 50
    steps (5 resets) of the process; if such a timeout fires, all others of the pool become four
    times as long. None uses only the two fixed timeouts."""

    learned_timeout_floor_s: float = 5.0
    """Smallest learned timeout in seconds (> 0). Raise it for simulators that are slow at times."""

    frozen_after_s: float | None = FROZEN_AFTER_S
    """A process that a signal has stopped (SIGSTOP) for this many seconds (>= 1) is killed as
    frozen; so is one that sleeps for five times as long without letting any of its threads run.
    None leaves both cases to the timeouts: for processes that you stop yourself."""

    start_timeout_s: float = 120.0
    """Time in seconds within which a process must be up (> 0); after that it is killed."""

    prepare_timeout_s: float = 600.0
    """Time in seconds (> 0) within which the process that is forked must be ready; it builds all
    environments of the run."""

    concurrent_starts: int = 4
    """Number of processes that start at the same time (>= 1); the others wait."""

    recycle_after_episodes: int | None = None
    """Episodes of a process, over all its simulators, after which it is replaced; None for never.
    For leaking simulators."""

    rss_limit_mb: int | None = None
    """Largest memory of a process at the end of an episode (MiB, resident and not shared with other
    processes); above it the process is replaced. None sets no limit."""

    max_restarts: int = 10
    """Deaths and freezes in the whole pool within `restart_window_s` that are tolerated; one more
    ends the run."""

    restart_window_s: float = 60.0
    """Length of the window of `max_restarts` in seconds (> 0)."""

    environment: dict[str, str] = msgspec.field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
    """Environment variables set in each simulator process, such as MUJOCO_GL."""

    render_devices: tuple[int, ...] = ()
    """EGL devices that render, assigned to the processes in turn as MUJOCO_EGL_DEVICE_ID. Empty
    assigns all GPUs that EGL lists, for environments that choose by
    `vla_rl.envs.mujoco.loading`."""

    def __post_init__(self) -> None:
        for field in ("num_envs", "envs_per_process", "concurrent_starts"):
            self.require(getattr(self, field) >= 1, field, ">= 1")
        for field in (
            "step_timeout_s",
            "reset_timeout_s",
            "start_timeout_s",
            "prepare_timeout_s",
            "restart_window_s",
        ):
            self.require(getattr(self, field) > 0, field, "> 0 seconds")
        factor = self.learned_timeout_factor
        self.require(
            factor is None or factor >= 1, "learned_timeout_factor", ">= 1, or None to learn none"
        )
        self.require(self.learned_timeout_floor_s > 0, "learned_timeout_floor_s", "> 0 seconds")
        may_freeze = self.frozen_after_s is None or self.frozen_after_s >= LEAST_FROZEN_AFTER_S
        self.require(
            may_freeze,
            "frozen_after_s",
            f">= {LEAST_FROZEN_AFTER_S:g} second, or None for no limit",
        )
        for field in ("recycle_after_episodes", "rss_limit_mb"):
            self.require(
                getattr(self, field) is None or getattr(self, field) >= 1,
                field,
                ">= 1, or None for no limit",
            )
        self.require(self.max_restarts >= 0, "max_restarts", ">= 0")
        self.require(
            all(device >= 0 for device in self.render_devices),
            "render_devices",
            "device numbers >= 0",
        )

    def envs_of_processes(self, num_envs: int) -> list[int]:
        """Return the number of simulators in each process, `num_envs` in all."""
        per_process = self.envs_per_process
        return [min(per_process, num_envs - first) for first in range(0, num_envs, per_process)]

    def require_room(self, num_processes: int) -> None:
        """Check that this process's limits allow this many simulator processes.

        Raises: ConfigError; see `actors.room`.
        """
        remedy = "take fewer processes (num_envs, or more envs_per_process)"
        require_room(
            num_processes,
            self.placement_of(0),
            beside=min(num_processes, self.concurrent_starts),
            remedy=remedy,
        )

    def leniency(self) -> Leniency:
        """Return the leniency of the learned timeouts of one pool."""
        return Leniency(self.learned_timeout_factor, self.learned_timeout_floor_s)

    def environment_of(self, index: int) -> dict[str, str]:
        """Return the environment variables of simulator process number `index`."""
        own = {**self.environment, PROCESS_INDEX_VARIABLE: str(index)}
        if self.render_devices:
            own["MUJOCO_EGL_DEVICE_ID"] = str(self.render_devices[index % len(self.render_devices)])
        return own

    def placement_of(self, index: int, specs: Iterable[EnvSpec] = ()) -> ChildProcess:
        """Return the placement of simulator process number `index`.

        `specs` are its environments, as far as known.
        """
        server = None
        if self.start == "fork":
            server = ForkServer(
                imports=("vla_rl.env_workers.worker",),
                prepare=(prepare_hook(specs),),
                env=self.environment,
                prepare_timeout_s=self.prepare_timeout_s,
            )
        return ChildProcess(
            env=self.environment_of(index),
            python=self.python,
            fork_from=server,
            frozen_after_s=self.frozen_after_s,
        )
