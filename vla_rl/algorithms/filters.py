"""Filters of groups and tokens, without state, and checks for settings that no group can satisfy.

The scheduler replaces a filtered group (`keep=`), frees its capacity at once, and ends a run in
which no group is ever kept (`max_filtered_in_a_row`). A masked trajectory stays in its group: it
still counts in the baseline.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.errors import ConfigError
from vla_rl.types import FINITE, Config, PositiveInt, ReadIf


def within_accuracy(success_rate: float, lowest: float, highest: float) -> bool:
    """Return whether lowest <= success_rate <= highest: a group neither too hard nor too easy.

    These are SimpleVLA-RL's accuracy bounds (Li et al. 2025, arXiv:2509.09674), which uses 0.1 and
    0.9; [0, 1] keeps every group.

    Args:
        success_rate: share of the group's members that solved the task, in [0, 1].
        lowest, highest: the bounds, 0 <= lowest <= highest <= 1.

    Raises: ConfigError for bounds that no rate can satisfy.
    """
    if not 0.0 <= lowest <= highest <= 1.0:
        raise ConfigError(
            f"accuracy bounds are [{lowest}, {highest}], expected 0 <= lowest <= highest <= 1."
        )
    return lowest <= success_rate <= highest


def has_equal_rewards(rewards: Sequence[float]) -> bool:
    """Return whether all rewards of a group are the same, so that its advantages are all 0.

    True for an empty group or one member. DAPO's dynamic sampling samples until this is False (Yu
    et al. 2025, arXiv:2503.14476, section 3.2).
    """
    # compared exactly: rewards that differ in their last digit, as scores of a simulator do, still
    # rank the members
    return len(rewards) < 2 or min(rewards) == max(rewards)


def require_satisfiable(
    group_size: int, lowest: float, highest: float, needs_difference: bool = False
) -> None:
    """Reject accuracy bounds that no group of this size can meet.

    Args:
        group_size: number of members of a group; their success rate is k / group_size for a whole
            k.
        lowest, highest: the bounds of `within_accuracy`.
        needs_difference: groups that are all solved or all failed are filtered too.

    Raises: ConfigError with the inequality.
    """
    # with such bounds the scheduler would filter group after group until it ends the run: refused
    # before the first episode instead
    first, last = (1, group_size - 1) if needs_difference else (0, group_size)
    if any(
        within_accuracy(solved / group_size, lowest, highest) for solved in range(first, last + 1)
    ):
        return
    raise ConfigError(
        f"no group of {group_size} can be kept: its success rate is k / {group_size} with {first} "
        f"<= k <= {last}, and none has {lowest} <= k / {group_size} <= {highest}; widen the bounds "
        "or use larger groups."
    )


class OverlongConfig(Config, frozen=True, kw_only=True):
    """DAPO's soft penalty on long episodes."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("buffer", "factor"), "max_length"),)

    max_length: PositiveInt | None = None
    """Length, in tokens, from which the full penalty applies; none turns the penalty off."""

    buffer: PositiveInt = 512
    """Number of tokens, up to `max_length`, over which the penalty grows from 0 to `factor`."""

    factor: Annotated[float, msgspec.Meta(ge=0, le=FINITE)] = 1.0
    """Reward that a trajectory of `max_length` or more loses."""

    def __post_init__(self) -> None:
        fits = self.max_length is None or self.buffer <= self.max_length
        self.require(fits, "buffer", f"at most max_length = {self.max_length}")


def overlong_penalty(lengths: NDArray[np.number], config: OverlongConfig) -> NDArray[np.float32]:
    """Compute DAPO's soft overlong punishment, to be added to the rewards.

    arXiv:2503.14476, section 3.4, eq. 13.

        -factor * clip((length - (max_length - buffer)) / buffer, 0, 1)

    Args:
        lengths: [N], in the unit of `config.max_length`.
        config: the penalty.

    Returns: float32 [N] in [-factor, 0]. (In verl it falls further beyond `max_length`.)
    """
    if config.max_length is None:
        return np.zeros(len(lengths), dtype=np.float32)
    excess = np.asarray(lengths, dtype=np.float64) - (config.max_length - config.buffer)
    return (-config.factor * np.clip(excess / config.buffer, 0.0, 1.0)).astype(np.float32)


def overlong_filter(mask: NDArray[np.bool_], is_truncated: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Remove cut-off trajectories from a mask: DAPO's overlong filtering.

    arXiv:2503.14476, section 3.4.

    Apply it after the advantages are computed, so that these trajectories still count in their
    group's baseline. Their tokens are removed from the denominators of the loss too.

    Args:
        mask: bool [N, S]. is_truncated: bool [N].

    Returns: bool [N, S].
    """
    if is_truncated.shape != mask.shape[:1]:
        raise ValueError(
            f"is_truncated is {list(is_truncated.shape)}, expected {list(mask.shape[:1])}: one "
            "per row of mask."
        )
    # the mask and not the group is changed: left out of its group's mean, a cut-off failure would
    # make the others look worse than they are
    return np.asarray(mask & ~is_truncated[:, None], dtype=np.bool_)
