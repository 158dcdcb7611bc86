"""Suites of tasks in a simulator, LIBERO's and Meta-World's: their tasks, their starts, the policies that fit them.

An episode has a suite, a task, an initial state and, in LIBERO, a scene seed.
"""

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from vla_rl.envs import LIBERO_SUITES, METAWORLD_SUITES
from vla_rl.envs.image_env import NUM_STARTS, is_whole
from vla_rl.envs.libero import tasks
from vla_rl.envs.metaworld import tasks as metaworld_tasks
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, derive_seed

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


_log = logging.getLogger(__name__)


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
    """Observation keys of the images."""

    state_size: int
    action_size: int

    simulator_mb: int
    """Private memory of a forked simulator."""

    server_mb: int
    """Memory of the server that simulators are forked from."""

    step_s: float
    """Seconds of one core for a control step with its share of images."""


ACTION_LIMIT: Final = 1.0
"""Largest size of a number of an action, which both arms clip to."""

LIBERO: Final = Benchmark(
    "LIBERO",
    "_libero",
    LIBERO_SUITES,
    tasks.list_tasks,
    tasks.get_step_limit,
    ("image", "wrist_image"),
    state_size=8,
    action_size=7,
    simulator_mb=140,  # with LIBERO's own assets; placeholder assets take a third
    server_mb=400,
    step_s=0.007,  # fast, both images, chunks of 8: docs/libero.md
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


def get_benchmark(suite: str) -> Benchmark:
    """Return the benchmark of a suite.

    Names that are unknown are taken for LIBERO's, which other packages extend.
    """
    return METAWORLD if suite in METAWORLD_SUITES else LIBERO


def describe_suites(benchmark: Benchmark, suite: str) -> str:
    """Return what a recipe of `benchmark` expects, which is given a suite that is none of its own."""
    own, other = f"{benchmark.name} ({', '.join(benchmark.suites)})", get_benchmark(suite)
    if suite not in other.suites:
        return own
    return f"{own}; the recipes for {other.name} end in {other.recipes}"


def require_fitting(
    policy: "RobotPolicy", checkpoint: str, benchmark: Benchmark, image_size: int | None = None
) -> None:
    """Raise ConfigError if a policy's cameras, state or actions do not fit the benchmark's arm, or its images
    those of the episodes.

    One line says what cannot be checked without data.

    Args:
        policy: the policy.
        checkpoint: its name in messages.
        benchmark: whose arm it is to move.
        image_size: pixels along each side of the images that it is shown; None if they are not known.
    """
    config: Any = policy.config
    lost = [camera for camera in config.cameras if camera not in benchmark.cameras]
    if lost:
        raise ConfigError(
            f"{checkpoint} needs the camera {lost[0]!r}, which {benchmark.name} does not have; its "
            f"cameras are {', '.join(benchmark.cameras)} (--cameras)"
        )
    if config.state_size not in (None, benchmark.state_size):
        raise ConfigError(
            f"{checkpoint} reads a state of {config.state_size} numbers, and "
            f"{benchmark.name}'s has {benchmark.state_size}"
        )
    # of flow policies alone
    padded = getattr(config, "padded_dim", None)
    if config.action_dim != benchmark.action_size:
        raise ConfigError(
            f"{checkpoint} gives actions of {config.action_dim} numbers, and "
            f"{benchmark.name}'s arm takes {benchmark.action_size}"
            + (
                f"; {padded} is the padded width, so the numbers beyond the arm's were never masked: state the "
                "arm's width in the folder, and statistics of that width"
                if config.action_dim == padded
                else ""
            )
        )
    own_size = getattr(config, "fixed_image_size", None)
    if image_size is not None and own_size not in (None, image_size):
        raise ConfigError(
            f"{checkpoint} sees images of {own_size} pixels and does not resize any, but {image_size} are to be "
            f"drawn; set --image-size {own_size}, or leave it out"
        )
    if padded is not None:
        _require_reachable(policy, checkpoint, benchmark)
        _log.warning(
            "%s: the gripper's range and sign were not checked, because there is no data to compare with",
            checkpoint,
        )


def _require_reachable(policy: "RobotPolicy", checkpoint: str, benchmark: Benchmark) -> None:
    """Raise ConfigError if a number of a flow policy's actions is never one that the arm can execute.

    openpi's pi0 policies of LIBERO learnt offsets from the state (`extra_delta_transform`), which no file of
    their folders says; executed as they are, they solve nothing.
    """
    num_offsets = getattr(policy.config, "state_offsets", 0)
    for number, (low, high) in enumerate(getattr(policy.config, "action_ends", None) or ()):
        if number < num_offsets:
            continue  # the state, which may be anywhere, is added
        if low > ACTION_LIMIT or high < -ACTION_LIMIT:
            raise ConfigError(
                f"{checkpoint}: the statistics have number {number} of an action from {low:.3g} to {high:.3g}, "
                f"and {benchmark.name}'s arm takes numbers from -1 to 1: the policy gives offsets from the "
                "state (extra_delta_transform in openpi's configuration: state_offsets 6), or is of another robot"
            )


Suite: TypeAlias = Literal[
    "libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"
]


def parse_numbers(text: str, most: int, what: str, *, limit: int | None = None) -> tuple[int, ...]:
    """Return the numbers that `text` names: "all", or numbers and ranges such as "0-3,7".

    They are in order, each once.

    Args:
        text: the text of the option.
        most: "all" means the numbers from 0 to `most` - 1.
        what: what the numbers are, for the error.
        limit: numbers must be below this; None: below `most`.

    Raises: ConfigError.
    """
    if text == "all":
        return tuple(range(most))
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(
            f"{what} are {text!r}, expected 'all', or numbers and ranges such as '0-3,7'"
        )
    chosen: dict[int, None] = {}
    highest = (most if limit is None else limit) - 1
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError(f"{what} are {text!r}, expected ascending ranges, not {part!r}")
        if int(last or first) > highest:
            raise ConfigError(f"{what} are {text!r}, expected numbers from 0 to {highest}")
        chosen |= dict.fromkeys(range(int(first), int(last or first) + 1))
    return tuple(chosen)


def parse_tasks(texts: Sequence[str], what: str) -> tuple[SuiteTask, ...]:
    """Return the tasks that `texts` name, in order and each once.

    Each text is a suite, or some tasks of one, such as "libero_goal/0-3,7" or
    "metaworld_mt10/drawer-open,reach".

    Args:
        texts: the values of the option.
        what: the option, for the error.

    Raises: ConfigError.
    """
    # by key, as two texts may name the same task, which must not count twice
    chosen: dict[str, SuiteTask] = {}
    for text in texts:
        suite, _, numbers = text.partition("/")
        tasks = list_suite_tasks(suite, what)
        of_suite = parse_task_ids(numbers if "/" in text else "all", tasks, f"{what} of {suite}")
        chosen |= {tasks[number].key: tasks[number] for number in of_suite}
    return tuple(chosen.values())


def parse_task_ids(text: str, tasks: Sequence[SuiteTask], what: str) -> tuple[int, ...]:
    """Return the tasks that `text` names, as `parse_numbers` does; parts of it may be names of tasks.

    Raises: ConfigError.
    """
    by_name = {task.name: str(task.task_id) for task in tasks}
    parts = [by_name.get(part, part) for part in text.split(",")]
    for part in parts:
        near = difflib.get_close_matches(part, by_name, n=1)
        if near and not part[0].isdigit():
            raise ConfigError(f"{what} are {text!r}, did you mean {near[0]!r} by {part!r}?")
        if part[:1].isalpha() and part != "all":
            raise ConfigError(
                f"{what} are {text!r}, expected 'all', numbers from 0 to {len(tasks) - 1}, ranges "
                f"such as 0-3, or names such as {tasks[0].name!r}; {part!r} is no task's name"
            )
    return parse_numbers(",".join(parts), len(tasks), what)


def list_suite_tasks(suite: str, what: str) -> tuple[SuiteTask, ...]:
    """Return all tasks of a suite.

    Raises: ConfigError, naming `what`, if the suite is unknown or not installed.
    """
    try:
        return tuple(get_benchmark(suite).list_tasks(suite))
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def count_initial_states(task: SuiteTask) -> int:
    """Return the number of a task's fixed initial states.

    Raises: ConfigError if its package has none that can be read.
    """
    try:
        return task.num_init_states
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{error} Choose others with --tasks.") from error


def check_starts(suite: str, task_ids: Sequence[int], init_states: Sequence[int]) -> None:
    """Raise ConfigError if a task does not exist, or a start's number is out of range."""
    num_tasks = len(list_suite_tasks(suite, "suite"))
    for task_id in task_ids:
        if not is_whole(task_id) or not 0 <= task_id < num_tasks:
            raise ConfigError(
                f"task_id is {task_id!r}, expected 0 to {num_tasks - 1}: {suite} has "
                f"{num_tasks} tasks."
            )
    if not init_states or min(init_states) < 0 or max(init_states) >= NUM_STARTS:
        raise ConfigError(
            f"init_states is {tuple(init_states)}, expected numbers from 0 to {NUM_STARTS - 1}"
        )


def require_for_libero(
    policy: "RobotPolicy", checkpoint: str, image_size: int | None = None
) -> None:
    """Raise ConfigError if a policy does not fit LIBERO's arm, as `require_fitting` does."""
    require_fitting(policy, checkpoint, LIBERO, image_size)


def libero_episode(
    env: EnvSpec, episode_id: int, task: str, init_state_id: int, *, sampling: Sampling, seed: int
) -> EpisodeSpec:
    """Make one episode.

    The seed of its decisions depends on its identity, not on the order of episodes.
    """
    return EpisodeSpec(
        episode_id=episode_id,
        group_id=episode_id,
        member=0,
        env=env,
        task=task,
        seed=0,
        # by its identity, so that a resume or another order of tasks gives the same actions
        policy_seed=derive_seed(seed, task, init_state_id, env.kwargs.get("scene_seed", 0)),
        options={"init_state_id": init_state_id},
        sampling=sampling,
    )
