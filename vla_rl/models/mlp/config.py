"""The shape of an MLP policy; imports without torch."""

from vla_rl.types import Config


class MlpConfig(Config, frozen=True, kw_only=True):
    """An MLP from a state vector to one categorical distribution for each value of an
    action chunk.
    """

    state_size: int
    """Length of `observation["state"]`."""

    action_low: tuple[float, ...]
    """Lowest action, one value for each dimension."""

    action_high: tuple[float, ...]
    """Highest action, one value for each dimension."""

    num_bins: int
    """Values that each dimension can take, evenly spaced from low to high, both included. A
    discrete action of n choices is one dimension from 0 to n - 1 with n bins."""

    chunk_size: int = 1
    """Control steps chosen at once."""

    hidden: tuple[int, ...] = (64, 64)
    """Widths of the hidden layers."""

    state_scale: tuple[float, ...] | None = None
    """Divisor for each value of the state, so that it is of order one; none leaves the state
    unscaled."""

    def __post_init__(self) -> None:
        self.require(self.state_size >= 1, "state_size", "at least 1")
        self.require(len(self.action_low) >= 1, "action_low", "at least one dimension")
        self.require(
            len(self.action_low) == len(self.action_high),
            "action_high",
            f"{len(self.action_low)} numbers",
        )
        rising = all(
            low < high for low, high in zip(self.action_low, self.action_high, strict=True)
        )
        self.require(
            rising, "action_high", f"above action_low = {self.action_low} in every dimension"
        )
        self.require(self.num_bins >= 2, "num_bins", "at least 2")
        self.require(self.chunk_size >= 1, "chunk_size", "at least 1 control step")
        self.require(
            len(self.hidden) >= 1 and min(self.hidden) >= 1,
            "hidden",
            "at least one layer of at least 1 unit",
        )
        scale = self.state_scale
        fits = scale is None or (len(scale) == self.state_size and min(scale) > 0.0)
        self.require(fits, "state_scale", f"{self.state_size} numbers above 0, or none")

    @property
    def action_dim(self) -> int:
        """Dimensions of the action of one control step."""
        return len(self.action_low)

    @property
    def num_tokens(self) -> int:
        """Tokens of one decision: one for each value of the chunk, step by step."""
        return self.chunk_size * self.action_dim
