"""Benchmarks, LIBERO and Meta-World: suites of tasks in one simulator, and what fits them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from vla_rl.envs import LIBERO_SUITES, METAWORLD_SUITES
from vla_rl.envs.libero import tasks as libero_tasks
from vla_rl.envs.metaworld import tasks as metaworld_tasks
from vla_rl.errors import ConfigError

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy


class SuiteTask(Protocol):
    """One task of a suite."""

    @property
    def suite(self) -> str: ...
    @property
    def task_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def num_init_states(self) -> int: ...


class Benchmark(NamedTuple):
    """Suites of tasks in one simulator."""

    name: str

    recipes: str
    """Ending of the names of its recipes."""

    suites: tuple[str, ...]
    """Its own suites; other packages may add some."""

    list_tasks: Callable[[str], Sequence[SuiteTask]]
    """Returns the tasks of a suite. Raises: `ValueError`, `FileNotFoundError`, `ImportError`."""

    step_limit_of: Callable[[str], int]
    """Returns the control steps after which an episode of a suite has failed."""

    cameras: tuple[str, ...]
    """Observation keys of the pictures."""

    state_size: int
    action_size: int

    simulator_mb: int
    """Private memory of a forked simulator."""

    server_mb: int
    """Memory of the server that simulators are forked from."""

    step_s: float
    """Seconds of one core for a control step with its share of pictures."""


LIBERO: Final = Benchmark(
    "LIBERO",
    "_libero",
    LIBERO_SUITES,
    libero_tasks.list_tasks,
    libero_tasks.step_limit_of,
    ("image", "wrist_image"),
    state_size=8,
    action_size=7,
    simulator_mb=140,  # with LIBERO's own assets; stand-ins take a third
    server_mb=400,
    step_s=0.007,  # fast, both pictures, chunks of 8: docs/libero.md
)

METAWORLD: Final = Benchmark(
    "Meta-World",
    "_metaworld",
    METAWORLD_SUITES,
    metaworld_tasks.list_tasks,
    lambda _suite: metaworld_tasks.STEP_LIMIT,
    ("image", "wrist_image"),
    state_size=4,
    action_size=4,
    simulator_mb=200,
    server_mb=100,
    step_s=0.003,
)


def benchmark_of(suite: str) -> Benchmark:
    """Return the benchmark of a suite.

    Names that are unknown are taken for LIBERO's, which other packages extend.
    """
    return METAWORLD if suite in METAWORLD_SUITES else LIBERO


def expected_of(benchmark: Benchmark, suite: str) -> str:
    """Return what a recipe of `benchmark` expects, which is given a suite that is none of its own."""
    own, other = f"{benchmark.name} ({', '.join(benchmark.suites)})", benchmark_of(suite)
    if suite not in other.suites:
        return own
    return f"{own}; the recipes for {other.name} end in {other.recipes}"


def require_fitting(policy: "VlaPolicy", checkpoint: str, benchmark: Benchmark) -> None:
    """Raise ConfigError if a policy's cameras, state or actions do not fit the benchmark's arm."""
    config = policy.config
    lost = [camera for camera in config.cameras if camera not in benchmark.cameras]
    if lost:
        raise ConfigError(
            f"{checkpoint} needs the camera {lost[0]!r}, which {benchmark.name} does not have; its "
            f"cameras are {', '.join(benchmark.cameras)} (--cameras)"
        )
    proprio = getattr(config, "proprio", None)
    if proprio is not None and len(proprio.low) != benchmark.state_size:
        raise ConfigError(
            f"{checkpoint} reads a state of {len(proprio.low)} numbers, and "
            f"{benchmark.name}'s has {benchmark.state_size}"
        )
    if config.action_dim != benchmark.action_size:
        raise ConfigError(
            f"{checkpoint} gives actions of {config.action_dim} numbers, and "
            f"{benchmark.name}'s arm takes {benchmark.action_size}"
        )
