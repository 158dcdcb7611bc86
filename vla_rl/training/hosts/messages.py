"""Messages between the control process and a rollout host: plain values, never code."""

import hashlib
from typing import Final

import msgspec

from vla_rl.rollout import DecisionCounts
from vla_rl.types import EnvSpec, Trajectory

PIECE_BYTES: Final = 16 << 20
"""Bytes of a policy's files or weights in one message."""


class HostRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a host needs to run episodes but the policy's files."""

    config_class: str
    """`module:Class` of the configuration."""

    config: bytes
    """The configuration as JSON."""

    envs: tuple[EnvSpec, ...]
    """Environments of the run, each once."""

    agent: str | None
    """`module:function` of the agent; None: that of the configuration."""

    policy_class: str
    """`module:Class`, with a classmethod `load(folder)`."""

    dtype: str
    """Type of the weights, such as `bfloat16`."""

    weight_version: int
    """Version of the weights in the policy's files."""

    num_envs: int | None = None
    """Environments, if the host has several engines that share them; None: those of the
    configuration."""

    fixed: str = ""
    """Digest of all of the policy that no later version of the weights changes."""

    @property
    def digest(self) -> str:
        """Digest of everything but the version: equal for a run and its resume."""
        same = msgspec.json.encode(msgspec.structs.replace(self, weight_version=0))
        return hashlib.blake2b(same, digest_size=16).hexdigest()


class WeightHeading(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the trained weights, before its bytes."""

    version: int
    names: tuple[str, ...]
    """Parameters in the order of their bytes."""

    forms: tuple[str, ...]
    """Type and shape of each, such as `torch.bfloat16 [32, 64]`."""

    num_bytes: int
    digest: str
    """BLAKE2b of all bytes, in hexadecimal digits."""


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


class HostStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The offer of a host that is ready."""

    num_slots: int
    weight_version: int
    weights_digest: str = ""
    """Digest of its weights; empty while they are those of the policy's files."""

    kept: tuple[int, ...] = ()
    """Keys of the arrays of finished episodes that were kept there."""
