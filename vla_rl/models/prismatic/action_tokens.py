"""Action tokens: the last ids of the vocabulary are bins of [-1, 1], counted downwards.

    edges     linspace(-1, 1, num_bins)          num_bins of them, so num_bins - 1 bins with a centre each
    encode    id = vocab_size - digitize(clip(a, -1, 1), edges)
    decode    a  = centre[clip(vocab_size - id - 1, 0, num_bins - 2)]

The larger the id, the smaller the action. The two smallest ids decode alike, because the last edge
has its own bin. The bounds of the training data map [-1, 1] to the environment's units, dimension
by dimension.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np

from vla_rl.types import Config, NonNegativeFloat

Gripper: TypeAlias = Literal["signed", "openvla"]
"""Last dimension of an action: `signed` keeps the environment's sign; `openvla` maps 0 = close and
1 = open to +1 and -1."""


class ActionBounds(Config, frozen=True, kw_only=True):
    """Values of -1 and 1 in the environment's units, dimension by dimension.

    Example:
        ActionBounds(low=(-0.88, -0.76, 0.0), high=(0.94, 0.91, 1.0), is_scaled=(True, True, False),
            gripper="openvla")
    """

    low: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    """The environment's value at -1: the 1st percentile of the training data, in the public
    checkpoints."""

    high: tuple[float, ...]
    """The environment's value at 1: the 99th percentile, in the public checkpoints."""

    is_scaled: tuple[bool, ...]
    """False for dimensions that are not scaled, such as the gripper."""

    gripper: Gripper = "signed"
    """Meaning of the last dimension."""

    epsilon: NonNegativeFloat = 0.0
    """Added to the range before it scales: 1e-8 in OpenVLA-OFT's code, nothing in OpenVLA's."""

    def __post_init__(self) -> None:
        self.require(
            len(self.high) == len(self.low), "high", f"{len(self.low)} numbers, as many as low has"
        )
        self.require(
            len(self.is_scaled) == len(self.low),
            "is_scaled",
            f"{len(self.low)} booleans, as many as low has",
        )
        rising = all(
            low <= high
            for low, high, scaled in zip(self.low, self.high, self.is_scaled, strict=True)
            if scaled
        )
        self.require(rising, "high", f"not below low = {self.low} in any scaled dimension")

    @property
    def action_dim(self) -> int:
        """Dimensions of the action of one control step."""
        return len(self.low)


def unit_bounds(action_dim: int) -> ActionBounds:
    """Return bounds that equal the model's [-1, 1], for policies trained here from scratch."""
    return ActionBounds(
        low=(-1.0,) * action_dim, high=(1.0,) * action_dim, is_scaled=(True,) * action_dim
    )


class ActionScaler:
    """Converts between the environment's units and the model's [-1, 1], in float64, dimension by
    dimension.
    """

    def __init__(self, bounds: ActionBounds) -> None:
        self._bounds = bounds
        self._low, self._high = np.array(bounds.low), np.array(bounds.high)
        self._range = self._high - self._low + bounds.epsilon
        self._is_scaled = np.array(bounds.is_scaled)
        self._is_constant = self._high <= self._low

    def to_unit(self, actions: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
        """Map actions to float64 [..., D] in [-1, 1]; values outside the bounds are clipped, a
        dimension without range becomes 0.

        Raises: ValueError if the number of dimensions does not match.
        """
        values = np.asarray(actions, dtype=np.float64)
        if values.shape[-1] != self._bounds.action_dim:
            raise ValueError(
                f"actions have {values.shape[-1]} dimensions, expected {self._bounds.action_dim} "
                "as in the policy's action bounds."
            )
        if self._bounds.gripper == "openvla":
            values = values.copy()
            # +1 = close, -1 = open becomes 0 = close, 1 = open
            values[..., -1] = (1.0 - values[..., -1]) / 2.0
        # A dimension without range would divide by zero; 0 is what the middle of any range
        # becomes.
        safe_range = np.where(self._is_constant, 1.0, self._range)
        scaled = np.where(self._is_constant, 0.0, 2.0 * (values - self._low) / safe_range - 1.0)
        return np.clip(np.where(self._is_scaled, scaled, values), -1.0, 1.0)

    def from_unit(self, unit: np.ndarray) -> np.ndarray:
        """Map to the environment's float32 [..., D]; computed in float64, rounded last.

        A gripper of exactly 1/2 closes.
        """
        values = self.unscaled(unit)
        if self._bounds.gripper == "openvla":
            # 1 = open becomes -1, 0 = close becomes +1
            values[..., -1] = np.where(values[..., -1] > 0.5, -1.0, 1.0)
        return values.astype(np.float32)

    def unscaled(self, unit: np.ndarray) -> np.ndarray:
        """Map to float64 [..., D] in the units of the training data: the statistics are applied,
        the gripper is still the data's.
        """
        unit = np.asarray(unit, dtype=np.float64)
        return np.where(self._is_scaled, 0.5 * (unit + 1.0) * self._range + self._low, unit)


class ActionTokenizer:
    """Converts between action chunks in the environment's units, float32 [..., D], and token ids,
    int64 [..., D].
    """

    def __init__(self, vocab_size: int, num_bins: int, bounds: ActionBounds) -> None:
        self._vocab_size, self._num_bins = vocab_size, num_bins
        self._scaler = ActionScaler(bounds)
        self._edges = np.linspace(-1.0, 1.0, num_bins)
        self._centres = (self._edges[:-1] + self._edges[1:]) / 2.0

    @property
    def first_id(self) -> int:
        """The smallest action token id, which stands for the largest action."""
        return self._vocab_size - self._num_bins

    def encode(self, actions: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
        """Return the token of each number; numbers outside the bounds are clipped to them."""
        return (self._vocab_size - np.digitize(self._scaler.to_unit(actions), self._edges)).astype(
            np.int64
        )

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Return the number of each token; ids outside the action range take the nearest bin."""
        return self._scaler.from_unit(self.to_unit(tokens))

    def to_unit(self, tokens: np.ndarray) -> np.ndarray:
        """Return the centre of each token's bin, float64 in [-1, 1]."""
        bins = np.clip(self._vocab_size - tokens - 1, 0, self._num_bins - 2)
        centres: np.ndarray = self._centres[bins]
        return centres


def require_chunks(actions: np.ndarray, chunk_size: int, action_dim: int) -> None:
    """Raise ValueError unless `actions` are chunks [B, chunk_size, action_dim]."""
    if actions.ndim != 3 or actions.shape[1:] != (chunk_size, action_dim):
        raise ValueError(
            f"actions are {list(actions.shape)}, expected [B, {chunk_size}, {action_dim}]."
        )
