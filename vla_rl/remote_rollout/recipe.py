"""The recipe that hosts get of a run, and the policies' files for them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import vla_rl.pipelines.config
from vla_rl.actors.importable import import_path
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.remote_rollout.agent_recipe import agent_recipe
from vla_rl.remote_rollout.messages import PIECE_BYTES, HostRecipe, MemberRecipe
from vla_rl.rollout import TaskStart
from vla_rl.team.members import Member, Team
from vla_rl.types import Agent


def recipe_of(
    config: LearningConfig, starts: Sequence[TaskStart], team: Team, agent: Agent
) -> HostRecipe:
    """Return what a host needs for the run's episodes, with weight version 0.

    Raises: ConfigError for a run that other hosts cannot play.
    """
    config.run.require(
        config.run.record_to is None, "record_to", "none with cluster.hosts: only episodes that "
        "run on this host can be recorded",
    )  # fmt: skip
    plain = _plain(config)
    try:
        return HostRecipe(
            config_class=import_path(type(plain)),
            config=msgspec.json.encode(plain),
            envs=_unique([start.env for start in starts]),
            agent=agent_recipe(agent),
            members={name: _member_recipe(member) for name, member in team.members.items()},
            weight_version=0,
        )
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"cluster.hosts needs parts that other hosts can import: {error}"
        ) from error


def _member_recipe(member: Member) -> MemberRecipe:
    policy = type(member.model)
    if not callable(getattr(policy, "load", None)) or not callable(getattr(policy, "save", None)):
        raise ConfigError(
            f"{policy.__name__} has no save(folder) or no classmethod load(folder), by which "
            "cluster.hosts brings it to other hosts; add them"
        )
    return MemberRecipe(
        policy_class=import_path(policy),
        dtype=str(next(member.model.network.parameters()).dtype).removeprefix("torch."),
        engine=member.engine,
    )


def _plain(config: LearningConfig) -> LearningConfig:
    """Return the settings that the library reads, without those of a recipe of its own."""
    # hosts need not have the recipe's module, which may be a script of the user
    kind = next(
        each for each in type(config).__mro__ if each.__module__ == vla_rl.pipelines.config.__name__
    )
    assert issubclass(kind, LearningConfig)
    return kind(**{name: getattr(config, name) for name in kind.__struct_fields__})


def _unique(envs: Sequence[Any]) -> tuple[Any, ...]:
    # specs hold dicts, so they are compared by their bytes
    return tuple({msgspec.json.encode(env): env for env in envs}.values())


def pieces_of(folder: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield all files of a folder: the name, the place of a piece, and the piece, uint8 [bytes]."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name, start = str(path.relative_to(folder)), 0
        with path.open("rb") as file:
            while (piece := file.read(PIECE_BYTES)) or start == 0:
                yield name, start, np.frombuffer(piece, np.uint8)
                start += len(piece)
                if not piece:
                    break
