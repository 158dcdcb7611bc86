"""Which groups are worth an update: decisions on one group, without state."""

from collections.abc import Sequence

from vla_rl.errors import ConfigError


def within_accuracy(success_rate: float, lowest: float, highest: float) -> bool:
    """Whether a group is neither too hard nor too easy: lowest <= success_rate <= highest, both ends included.

    SimpleVLA-RL's accuracy bounds (Li et al. 2025, arXiv:2509.09674), there 0.1 and 0.9; [0, 1] keeps every group.

    Args:
        success_rate: share of the group's members that solved the task, in [0, 1].
        lowest, highest: the bounds, 0 <= lowest <= highest <= 1.

    Raises: ConfigError for bounds that nothing can satisfy.
    """
    if not 0.0 <= lowest <= highest <= 1.0:
        raise ConfigError(f"accuracy bounds are [{lowest}, {highest}], expected 0 <= lowest <= highest <= 1.")
    return lowest <= success_rate <= highest


def has_equal_rewards(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are the same, so that its advantages are all 0 (DAPO's dynamic sampling,
    Yu et al. 2025, arXiv:2503.14476, section 3.2, which samples again until this is False). Empty or of one: True.
    """
    return len(rewards) < 2 or min(rewards) == max(rewards)
