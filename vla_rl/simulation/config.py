"""How many simulators run, and what is done about those that die, freeze or grow."""

import msgspec

from vla_rl.types import Config


class SimulatorConfig(Config, frozen=True, kw_only=True):
    """Simulator processes of one pool, one environment in each."""

    num_envs: int = 1
    """Simulator processes, and so episodes played at the same time."""

    step_timeout_s: float = 60.0
    """A simulator that takes longer over one message (a control step, or a whole chunk of them) is killed as frozen."""

    reset_timeout_s: float = 180.0
    """The same for building an environment and for a reset."""

    start_timeout_s: float = 120.0
    """A process that is not up after this long is killed."""

    concurrent_starts: int = 4
    """How many processes start at the same time; the others wait their turn."""

    max_episodes: int | None = None
    """A process is replaced after this many episodes; None never does. For simulators that leak."""

    max_rss_mb: int | None = None
    """A process that holds more memory at the end of an episode is replaced; None never does."""

    max_restarts: int = 10
    """Deaths and freezes in the whole pool within `restart_window_s` that are still put down to chance; more end the run."""

    restart_window_s: float = 60.0
    """See `max_restarts`."""

    environment: dict[str, str] = msgspec.field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
    """Environment variables set in every simulator process, such as MUJOCO_GL."""

    egl_devices: tuple[int, ...] = ()
    """GPUs that render, dealt out to the processes in turn as MUJOCO_EGL_DEVICE_ID; empty leaves it as it is."""

    def __post_init__(self) -> None:
        for field in ("num_envs", "concurrent_starts"):
            self.require(getattr(self, field) >= 1, field, ">= 1")
        for field in ("step_timeout_s", "reset_timeout_s", "start_timeout_s", "restart_window_s"):
            self.require(getattr(self, field) > 0, field, "> 0 seconds")
        for field in ("max_episodes", "max_rss_mb"):
            self.require(getattr(self, field) is None or getattr(self, field) >= 1, field, ">= 1, or None for no limit")
        self.require(self.max_restarts >= 0, "max_restarts", ">= 0")
        self.require(all(device >= 0 for device in self.egl_devices), "egl_devices", "device numbers >= 0")

    def environment_of(self, index: int) -> dict[str, str]:
        """Environment variables of the simulator process number `index`."""
        if not self.egl_devices:
            return dict(self.environment)
        return {**self.environment, "MUJOCO_EGL_DEVICE_ID": str(self.egl_devices[index % len(self.egl_devices)])}
