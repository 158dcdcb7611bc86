"""LIBERO's episodes by suite, task, initial state and scene seed."""

import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

from vla_rl.envs.libero.tasks import find_task
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, derive_seed

Suite: TypeAlias = Literal["libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"]


def numbers_in(text: str, most: int, what: str) -> tuple[int, ...]:
    """The numbers that `text` names, in order and each once: "all", or a list of numbers and ranges such as "0-3,7".

    Args:
        text: as it was given.
        most: numbers go from 0 to `most` - 1.
        what: whose numbers they are, for the error.

    Raises: ConfigError.
    """
    if text == "all":
        return tuple(range(most))
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(f"{what} are {text!r}, expected 'all', or numbers and ranges such as '0-3,7'")
    chosen: dict[int, None] = {}
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise ConfigError(f"{what} are {text!r}, expected ranges that rise, not {part!r}")
        chosen |= dict.fromkeys(range(int(first), int(last or first) + 1))
    if max(chosen) >= most:
        raise ConfigError(f"{what} are {text!r}, expected numbers from 0 to {most - 1}")
    return tuple(chosen)


def check_starts(suite: str, task_ids: Sequence[int], init_states: Sequence[int]) -> None:
    """Raises: ConfigError where a task or one of its initial states does not exist."""
    for task_id in task_ids:
        try:
            most = find_task(suite, task_id).num_init_states
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not init_states or min(init_states) < 0 or max(init_states) >= most:
            raise ConfigError(f"init_states is {tuple(init_states)}, expected numbers from 0 to {most - 1}")


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
) -> EnvSpec:
    """One task as an environment; arguments as `LiberoEnv`'s."""
    kwargs = {
        "task_id": task_id,
        "image_size": image_size,
        "step_limit": step_limit,
        "assets": assets,
        "physics": physics,
        "quality": quality,
        "scene_seed": scene_seed,
    }
    return EnvSpec(id=f"vla_rl/{suite}-v0", kwargs=kwargs)


def libero_episode(
    env: EnvSpec, episode_id: int, task: str, init_state_id: int, *, sampling: Sampling, seed: int
) -> EpisodeSpec:
    """One episode; its decisions are seeded by what it is, not by when it is played."""
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
