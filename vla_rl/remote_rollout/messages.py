"""Messages between the control process and a rollout host: plain values, never code."""

import hashlib
from typing import Final

import msgspec

from vla_rl.algorithms import EmbeddingConfig
from vla_rl.engines import EngineConfig
from vla_rl.remote_rollout.agent_recipe import AgentRecipe
from vla_rl.rollout import DecisionCounts
from vla_rl.types import EnvSpec, Trajectory

PIECE_BYTES: Final = 16 << 20
"""Bytes of a policy's files in one message."""

WEIGHT_PIECE_BYTES: Final = 2 << 20
"""Bytes of weights in one message. A host passes a piece on once it has all of it, so that each host
of a chain is later by one piece than the one before."""


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
    def digest(self) -> str:
        """Digest of everything but the version: equal for a run and its resume."""
        same = msgspec.json.encode(msgspec.structs.replace(self, weight_version=0))
        return hashlib.blake2b(same, digest_size=16).hexdigest()


class WeightHeading(msgspec.Struct, frozen=True, kw_only=True):
    """A version of one policy's trained weights, before its bytes."""

    member: str
    """The policy's member name."""

    version: int
    names: tuple[str, ...]
    """Parameters in the order of their bytes."""

    forms: tuple[str, ...]
    """Type and shape of each, such as `torch.bfloat16 [32, 64]`."""

    num_bytes: int


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a host gives its weights to one neighbour."""

    port: int
    public_key: str


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host came with taking weights from a neighbour."""

    num_bytes: int
    """Bytes that it has, from the first one on."""

    fault: str = ""
    """Why the rest did not come from there; empty if all came."""

    is_unreachable: bool = False
    """Whether no connection could be made."""


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """An episode that was lost there: its simulator died, froze or took too long."""

    kind: str
    what: str


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an episode on a host."""

    trajectory: Trajectory | None
    """None if the episode was lost."""

    loss: Loss | None = None
    counts: DecisionCounts
    """Decisions of all episodes there, up to now."""


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The weights with which a host acts for one policy."""

    version: int
    digest: str = ""
    """Digest of the trained weights; empty while they are those of the policy's files."""


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
