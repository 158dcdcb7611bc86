"""Settings of a steered policy: the head's kind and sizes, and where its frozen base is found.

Importing this module does not import torch.
"""

from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from vla_rl.models.prismatic.conventions import AS_STORED, CheckpointFormat
from vla_rl.types import Config, NonNegativeInt, PositiveFloat, PositiveInt

SteeringKind: TypeAlias = Literal["residual", "noise", "tokens"]
"""Meaning of the head's action: a chunk, the first noise of a flow, or quantiles of token distributions."""


class SteeringConfig(Config, frozen=True, kw_only=True):
    """A head over a frozen base. Its defaults have about 0.1 million parameters on small features.

    Example:
        SteeringConfig(scale=(0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 2.0))  # LIBERO: the gripper may be turned over
        SteeringConfig(kind="noise", limit=1.0, learns_std=True)  # DSRL on LIBERO
    """

    kind: SteeringKind = "residual"
    """Action of the head. residual: the chunk itself, as a bounded correction of the base's chunk (RLT,
    arXiv:2604.23073). noise: the first noise of a flow policy (DSRL, arXiv:2506.15799). tokens: a quantile
    of each token's distribution, for policies that choose all tokens of a chunk at once."""

    hidden: Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)] = (256, 256)
    """Widths of the head's hidden layers."""

    scale: Annotated[tuple[PositiveFloat, ...], msgspec.Meta(min_length=1)] = (0.5,)
    """Largest correction of a residual head, in units in which the base's actions are about [-1, 1]: one
    number, or one for each dimension of a control step. A gripper needs 2 to be turned over. Heads that steer
    do not read it."""

    corrects_reference: bool = True
    """Whether a residual head adds to the base's chunk. False: it chooses a whole chunk, each number within
    `scale` of 0, with the base's chunk as an input."""

    std: PositiveFloat = 0.1
    """Standard deviation of the head's Gaussian while it explores; where it is learnt, its first value."""

    learns_std: bool = False
    """Whether the standard deviation is an output of the head, as SAC needs it."""

    shares_noise: bool = False
    """Whether the control steps of a chunk share their exploration noise, which moves further than independent
    noise. Its density is that of the first control step, so losses of a ratio learn nothing of the others."""

    limit: PositiveFloat = 1.0
    """Largest magnitude of a number that steers (noise, tokens): 1.0 on LIBERO, 2.0 to 2.5 on robots."""

    repeats_noise: bool = True
    """Whether a head that steers noise chooses that of one control step, which all others of the chunk repeat, as
    in DSRL. False: noise of its own for each executed control step."""

    features: Literal["mean", "rows"] = "mean"
    """Features of the base. mean: its own, one vector for each observation. rows: one vector for each control
    step of the chunk, which OpenVLA-OFT has; more numbers that say more of the chunk."""

    proprio_size: NonNegativeInt = 0
    """First numbers of `observation["state"]` that the head reads beside the features; 0: none."""

    reference_by_mean: bool = False
    """Whether the reference of a token policy is the mean of each token's distribution; otherwise its likeliest
    token. On our LIBERO policy the mean solved 19 of 36 starts, the likeliest 16."""

    def __post_init__(self) -> None:
        # The scale is left out: a recipe may have one for its robot, whatever the kind.
        unused = [
            *(["corrects_reference"] if self.steers else ["limit"]),
            *([] if self.kind == "noise" else ["repeats_noise"]),
        ]
        for name in unused:
            # An option that nothing reads would leave its user believing that it holds.
            is_default = getattr(self, name) == _DEFAULTS[name]
            self.require(
                is_default, name, f"its default for kind = {self.kind!r}, which does not read it"
            )

    @property
    def is_one_step_repeated(self) -> bool:
        """Whether the head chooses numbers of one control step, which the others repeat."""
        return self.kind == "noise" and self.repeats_noise

    @property
    def steers(self) -> bool:
        """Whether the action steers the base's own choice instead of being the chunk."""
        return self.kind != "residual"


_DEFAULTS: Final = {
    "scale": (0.5,),
    "corrects_reference": True,
    "limit": 1.0,
    "repeats_noise": True,
}


class HeadSizes(Config, frozen=True, kw_only=True):
    """Numbers that a head reads and chooses."""

    features: PositiveInt
    """Z, numbers of the base's features."""

    proprio: NonNegativeInt
    """P, numbers of the robot's state."""

    action: PositiveInt
    """A, numbers of the head's action, and of the reference."""

    action_dim: PositiveInt
    """D, numbers of one control step; it divides the action."""


class BaseSource(Config, frozen=True, kw_only=True):
    """The folder of a frozen base, with settings of how its checkpoint is interpreted."""

    path: str
    """Folder or hub id."""

    format: CheckpointFormat = AS_STORED
    """Settings that its files leave out."""


@dataclass(frozen=True)
class SteeredConfig:
    """Facts about a steered policy that recipes read.

    Attributes:
        cameras: observation keys of the images that the base sees.
        state_size: numbers of the state that base or head read; None if neither reads it.
        chunk_size: control steps of a decision.
        action_dim: numbers of one control step.
        steering: settings of the head.
        base_digest: SHA-256 of the base; two policies of equal configurations are over one base.
    """

    cameras: tuple[str, ...]
    state_size: int | None
    chunk_size: int
    action_dim: int
    steering: SteeringConfig
    base_digest: str
