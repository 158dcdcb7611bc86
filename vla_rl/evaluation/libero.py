"""LIBERO's episodes by suite, task, initial state and scene seed."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vla_rl.envs import LIBERO_SUITES
from vla_rl.envs.libero.tasks import Task, find_task, list_tasks
from vla_rl.envs.picture_env import NUM_STARTS
from vla_rl.errors import ConfigError
from vla_rl.evaluation.results import Key
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, derive_seed

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy

SIMULATOR_MB: Final = 140
"""Private memory of a forked simulator with LIBERO's own assets; stand-ins take a third."""

SERVER_MB: Final = 400
"""Memory of the server that simulators are forked from."""

CAMERAS: Final = ("image", "wrist_image")
STATE_SIZE: Final = 8
ACTION_SIZE: Final = 7

Suite: TypeAlias = Literal[
    "libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"
]


def numbers_in(text: str, most: int, what: str, *, limit: int | None = None) -> tuple[int, ...]:
    """Return the numbers that `text` names, in order and each once: "all", or numbers and ranges
    such as "0-3,7".

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


def tasks_in(texts: Sequence[str], what: str) -> tuple[Task, ...]:
    """Return the tasks that `texts` name, in order and each once: a suite, or some tasks, such as
    "libero_goal/0-3,7".

    Args:
        texts: the values of the option.
        what: the option, for the error.

    Raises: ConfigError.
    """
    chosen: dict[str, Task] = {}
    for text in texts:
        suite, _, numbers = text.partition("/")
        tasks = tasks_of(suite, what)
        of_suite = numbers_in(numbers if "/" in text else "all", len(tasks), f"{what} of {suite}")
        chosen |= {tasks[number].key: tasks[number] for number in of_suite}
    return tuple(chosen.values())


def tasks_of(suite: str, what: str) -> tuple[Task, ...]:
    """Return all tasks of a suite.

    Raises: ConfigError, naming `what`, if the suite is unknown or not installed.
    """
    try:
        return list_tasks(suite)
    except (FileNotFoundError, ImportError, ValueError) as error:
        raise ConfigError(f"{what}: {error}") from error


def num_states_of(task: Task) -> int:
    """Return the number of a task's fixed initial states.

    Raises: ConfigError if its package has none that can be read.
    """
    try:
        return task.num_init_states
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"{error} Choose others with --tasks.") from error


def check_starts(suite: str, task_ids: Sequence[int], init_states: Sequence[int]) -> None:
    """Raise ConfigError if a task does not exist, or a start's number is out of range."""
    for task_id in task_ids:
        try:
            find_task(suite, task_id)
        except (FileNotFoundError, ImportError, ValueError) as error:
            raise ConfigError(str(error)) from error
    if not init_states or min(init_states) < 0 or max(init_states) >= NUM_STARTS:
        raise ConfigError(
            f"init_states is {tuple(init_states)}, expected numbers from 0 to {NUM_STARTS - 1}"
        )


def libero_env(
    suite: str,
    task_id: int,
    *,
    assets: str | None,
    image_size: int,
    step_limit: int | None,
    physics: str,
    quality: str,
    scene_seed: int = 0,
    scenes: str = "same",
) -> EnvSpec:
    """Return the specification of one task's environment; arguments as in `LiberoEnv`."""
    kwargs = {
        "task_id": task_id,
        "image_size": image_size,
        "step_limit": step_limit,
        "assets": assets,
        "physics": physics,
        "quality": quality,
        "scene_seed": scene_seed,
        **({} if scenes == "same" else {"scenes": scenes}),
    }
    return suite_env(suite, kwargs)


def suite_env(suite: str, kwargs: dict[str, Any]) -> EnvSpec:
    """Return the specification of a suite's environment: with its own id for LIBERO's suites, else
    `vla_rl/libero-v0`.
    """
    if suite in LIBERO_SUITES:
        return EnvSpec(id=f"vla_rl/{suite}-v0", kwargs=kwargs)
    return EnvSpec(id="vla_rl/libero-v0", kwargs={"suite": suite, **kwargs})


def require_for_libero(policy: "VlaPolicy", checkpoint: str) -> None:
    """Raise ConfigError if a policy's cameras, state or actions are not those of LIBERO's arm."""
    config = policy.config
    lost = [camera for camera in config.cameras if camera not in CAMERAS]
    if lost:
        raise ConfigError(
            f"{checkpoint} needs the camera {lost[0]!r}, which LIBERO does not have; its cameras "
            "are "
            f"{', '.join(CAMERAS)} (--cameras)"
        )
    proprio = getattr(config, "proprio", None)
    if proprio is not None and len(proprio.low) != STATE_SIZE:
        raise ConfigError(
            f"{checkpoint} reads a state of {len(proprio.low)} numbers, and "
            f"LIBERO's has {STATE_SIZE}"
        )
    if config.action_dim != ACTION_SIZE:
        raise ConfigError(
            f"{checkpoint} gives actions of {config.action_dim} numbers, and LIBERO's arm takes "
            f"{ACTION_SIZE}"
        )


def key_of(episode: EpisodeSpec) -> Key:
    """Return the identity of a LIBERO episode: task, initial state and scene seed."""
    return episode.task, episode.options["init_state_id"], episode.env.kwargs["scene_seed"]


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
        policy_seed=derive_seed(seed, task, init_state_id, env.kwargs["scene_seed"]),
        options={"init_state_id": init_state_id},
        sampling=sampling,
    )
