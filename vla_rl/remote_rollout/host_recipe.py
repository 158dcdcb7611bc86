"""The part of a run that a host gets to run its episodes: plain values and files, never code.

    partial(chat_agent, limits=ChatLimits(...)) ─► AgentRecipe ─► the same partial on the host

A host keeps the digests of what it got, so that a resume of the same run finds it again.
"""

import hashlib
import logging
import pkgutil
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

import vla_rl.pipelines.config
from vla_rl.algorithms import EmbeddingConfig, TrajectoryEncoder
from vla_rl.cluster.run_layout import RunShape
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.envs.text import is_text_task
from vla_rl.errors import ConfigError
from vla_rl.models.trajectory_encoders import PolicyTowerEncoder, trajectory_encoder
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.remote_rollout.flat_weights import HeldVersion
from vla_rl.rollout import DecisionCounts, TaskStart
from vla_rl.team.members import Member, RunModel, Team
from vla_rl.types import Agent, EnvSpec, EpisodeSpec, Trajectory
from vla_rl.util.atomic_files import replace_file
from vla_rl.util.imports import import_path

_PLAIN_TYPES: Final = (str, int, float, bool, type(None))


class BoundArgument(msgspec.Struct, frozen=True, kw_only=True):
    """The value of one keyword argument."""

    json: bytes
    struct: str | None = None
    """`module:Class` of a msgspec struct, such as a configuration; None for a plain value."""


class AgentRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that another process can import."""

    function: str
    """`module:function`."""

    arguments: dict[str, BoundArgument] = {}
    """Keyword arguments that are bound to it."""


def make_agent_recipe(agent: Agent) -> AgentRecipe:
    """Return the recipe of a function, or of a `functools.partial` with keyword arguments.

    Raises: TypeError if another process cannot import it, or for an argument that is neither a
        plain value nor a struct.
    """
    if not isinstance(agent, partial):
        return AgentRecipe(function=import_path(agent))
    if agent.args:
        raise TypeError(f"{agent} binds arguments by position: bind them by name")
    arguments = {name: _bind(agent, name, value) for name, value in agent.keywords.items()}
    return AgentRecipe(function=import_path(agent.func), arguments=arguments)


def make_agent(recipe: AgentRecipe) -> Agent:
    """Return the agent of a recipe. Raises: ConfigError if this host cannot import it."""
    function: Callable[..., Any] = import_named(recipe.function)
    arguments = {
        name: msgspec.json.decode(
            bound.json, type=Any if bound.struct is None else import_named(bound.struct)
        )
        for name, bound in recipe.arguments.items()
    }
    return partial(function, **arguments) if arguments else function


def import_named(path: str) -> Any:
    """Return what `module:name` names. Raises: ConfigError if this host cannot import it."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this host cannot import {path}: {error}; expected the same modules as on the control "
            "process's host, in a package that is installed, or on PYTHONPATH of `vla-rl host`"
        ) from error


def _bind(agent: "partial[Any]", name: str, value: object) -> BoundArgument:
    if isinstance(value, msgspec.Struct):
        return BoundArgument(json=msgspec.json.encode(value), struct=import_path(type(value)))
    if not isinstance(value, _PLAIN_TYPES):
        raise TypeError(
            f"{agent} binds {name!r} to a {type(value).__name__}; expected text, numbers or a "
            "configuration, or a function of its own in a module"
        )
    return BoundArgument(json=msgspec.json.encode(value))


PIECE_BYTES: Final = 16 << 20
"""Bytes of a policy's files in one message."""


class MemberRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a host needs to act with one policy but its files."""

    policy_class: str
    """`module:Class`, with a classmethod `load(folder)`."""

    dtype: str
    """Type of the weights, such as `bfloat16`."""

    engine: EngineConfig | None = None
    """Settings of its engine; None: those of the run."""

    fixed: str = ""
    """Digest of all of the policy that no later version of the weights changes."""


class EnvironmentShare(msgspec.Struct, frozen=True, kw_only=True):
    """The environments of one of several engines that share those of a host."""

    num_envs: int
    kinds: dict[str, int] = {}
    """Environments of each kind, which add up to `num_envs`; empty if all are of one kind."""


class HostRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a host needs to run episodes but the policies' files."""

    config_class: str
    """`module:Class` of the configuration."""

    config: bytes
    """The configuration as JSON."""

    envs: tuple[EnvSpec, ...]
    """Environments of the run, each once."""

    agent: AgentRecipe

    members: dict[str, MemberRecipe]
    """The policies, by member name."""

    weight_version: int
    """Version of the weights in the policies' files."""

    embedding: EmbeddingConfig | None = None
    """Encoder of the episodes that are fetched; None: the control process embeds them, if any."""

    share: EnvironmentShare | None = None
    """Environments, if the host has several engines that share them; None: those of the
    configuration."""

    @property
    def recipe_digest(self) -> str:
        """Digest of everything but the version: equal for a run and its resume."""
        same = msgspec.json.encode(msgspec.structs.replace(self, weight_version=0))
        return hashlib.blake2b(same, digest_size=16).hexdigest()


class LostEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that was lost there: its simulator died, froze or took too long."""

    kind: str
    what: str


class HostEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode on a host."""

    trajectory: Trajectory | None
    """None if the episode was lost."""

    loss: LostEpisode | None = None
    counts: DecisionCounts
    """Decisions of all episodes there, up to now."""


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of a host that is ready."""

    num_slots: int
    held: dict[str, HeldVersion]
    """Weights by member name."""

    kept: tuple[int, ...] = ()
    """Keys of the arrays of finished episodes that were kept there."""

    @property
    def weight_version(self) -> int:
        """Version of the policy that is furthest behind."""
        return min(held.version for held in self.held.values())


def make_host_recipe(
    config: LearningConfig, starts: Sequence[TaskStart], team: Team, agent: Agent
) -> HostRecipe:
    """Return what a host needs for the run's episodes, with weight version 0.

    Raises: ConfigError for a run that other hosts cannot run.
    """
    config.run.require(
        config.run.record_to is None, "record_to", "none with cluster.hosts: only episodes that "
        "run on this host can be recorded",
    )  # fmt: skip
    # such a pool is code of the recipe, which hosts need not have
    if type(config).make_own_pool is not LearningConfig.make_own_pool:
        raise ConfigError(
            f"the environments of {type(config).__name__} come from a pool of its own, which other "
            "hosts cannot make; leave cluster.hosts empty"
        )
    plain = _without_recipe(config)
    try:
        return HostRecipe(
            config_class=import_path(type(plain)),
            config=msgspec.json.encode(plain),
            envs=_unique_envs([start.env for start in starts]),
            agent=make_agent_recipe(agent),
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


def _without_recipe(config: LearningConfig) -> LearningConfig:
    """Return the settings that the library reads, without those of a recipe of its own."""
    # hosts need not have the recipe's module, which may be a script of the user
    kind = next(
        each for each in type(config).__mro__ if each.__module__ == vla_rl.pipelines.config.__name__
    )
    assert issubclass(kind, LearningConfig)
    return kind(**{name: getattr(config, name) for name in kind.__struct_fields__})


def _unique_envs(envs: Sequence[Any]) -> tuple[Any, ...]:
    # specs hold dicts, so they are compared by their bytes
    return tuple({msgspec.json.encode(env): env for env in envs}.values())


def read_pieces(folder: Path) -> Iterator[tuple[str, int, np.ndarray]]:
    """Yield all files of a folder: the name, the place of a piece, and the piece, uint8 [bytes]."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name, start = str(path.relative_to(folder)), 0
        with path.open("rb") as file:
            # an empty file has one piece as well, or the host would lack it
            while (piece := file.read(PIECE_BYTES)) or start == 0:
                yield name, start, np.frombuffer(piece, np.uint8)
                start += len(piece)
                if not piece:
                    break


SIMULATORS: Final = "simulators"
CONVERSATIONS: Final = "text"
"""Kinds of environments, by the name of the settings that have their number."""


def run_shape(config: LearningConfig, team: Team) -> RunShape:
    """Return what decides the layout of a run on several hosts."""
    engines = {(member.engine or config.engine).kind for member in team.members.values()}
    return RunShape(
        num_envs=config.num_envs,
        kinds=environment_kinds(config),
        num_ranks=config.learner.ranks,
        local_rollout=config.cluster.local_rollout,
        uses_gpus=config.run.device != "cpu" and engines != {"server"},
        spans_gpus=engines != {"torch"},
        learners=config.cluster.learners,
        group_size=config.learner.tensor_parallel,
    )


def environment_kinds(config: LearningConfig) -> dict[str, int]:
    """Return the number of environments of each kind; empty if all are of one kind."""
    if not isinstance(config, MixedTrainingConfig):
        return {}
    return {SIMULATORS: config.simulators.num_envs, CONVERSATIONS: config.text.num_envs}


def environment_kind(episode: EpisodeSpec) -> str:
    """Return the kind of environment in which an episode of a run of several kinds runs."""
    return CONVERSATIONS if is_text_task(episode.env) else SIMULATORS


def with_environments(config: LearningConfig, share: EnvironmentShare) -> LearningConfig:
    """Return the same settings with fewer environments."""
    if isinstance(config, MixedTrainingConfig):
        return replace(
            config,
            simulators=replace(config.simulators, num_envs=share.kinds[SIMULATORS]),
            text=replace(config.text, num_envs=share.kinds[CONVERSATIONS]),
        )
    if isinstance(config, TrainingConfig):
        return replace(config, simulators=replace(config.simulators, num_envs=share.num_envs))
    assert isinstance(config, TextTrainingConfig)
    return replace(config, text=replace(config.text, num_envs=share.num_envs))


logger = logging.getLogger(__name__)

KEY_FILE: Final = "hosts_key"
"""File of a run's directory by which its hosts know it."""


def run_key(run: Path) -> str:
    """Return the name by which hosts know a run, the same after a resume.

    It is written at the first call; if it cannot be, it is empty, with a warning.
    """
    file = run / KEY_FILE
    try:
        if not file.exists():
            # at random: two runs of one name are not one run
            replace_file(file, f"{run.name}-{secrets.token_hex(16)}\n".encode())
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        logger.warning(
            "%s cannot be used: %s. A resume will start everything on the hosts anew", file, error
        )
        return ""


def fixed_digest(model: Any) -> str:
    """Digest what publications do not carry of a policy: its files, frozen weights and buffers.

    Call it on the device lane.
    """
    digest = hashlib.blake2b(digest_size=16)
    # Each with its length: files whose bytes were moved from one to the next would have the same digest.
    for name, content in sorted(model.checkpoint_files().items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    weights = model.network.named_parameters()
    fixed = {name: each for name, each in weights if not each.requires_grad}
    for name, each in (*fixed.items(), *model.network.named_buffers()):
        digest.update(f"{name} {each.dtype} {list(each.shape)}".encode())
        flat = each.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


TOWER_FILE: Final = "encoder.safetensors"
"""File beside the policies' folders."""


def save_encoder(encoder: TrajectoryEncoder, folder: Path) -> None:
    """Write what hosts cannot make of the policy's files, on the device lane."""
    if isinstance(encoder, PolicyTowerEncoder):
        encoder.save_tower(folder / TOWER_FILE)


def load_encoder(
    config: EmbeddingConfig, model: RunModel, lane: DeviceLane, folder: Path, device: torch.device
) -> TrajectoryEncoder:
    """Return the run's encoder.

    Args:
        config: selects the encoder.
        model: the policy.
        lane: computes with the encoder.
        folder: folder with the policies' files.
        device: device on which the encoder computes.

    Raises: ConfigError, CheckpointError if it cannot be made here.
    """
    assert not hasattr(model, "render"), "an encoder is of a policy that sees images"
    encoder = trajectory_encoder(config, model, lane, device)
    if isinstance(encoder, PolicyTowerEncoder):
        encoder.load_tower(folder / TOWER_FILE)
    return encoder
