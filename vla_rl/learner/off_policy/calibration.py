"""The critic's values beside what was measured: of each update's new episodes, and of what is possible.

Values of actions that nothing has tried are extrapolation. They show first as values that no episode can
earn, and as values that do not rank episodes as their returns do.
"""

import logging
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from vla_rl.learner.off_policy.config import WITH_Q, OffPolicyConfig
from vla_rl.replay.transitions import discount_returns

_log = logging.getLogger(__name__)

MARGIN = 0.1
"""Share of the range of returns by which a mean value may leave it, for errors of approximation."""

ROUNDING = 1e-4
"""Share of the range of returns by which a return may leave it, for sums in float32."""


def describe_impossible_return(rows: np.ndarray, config: OffPolicyConfig) -> str | None:
    """Return what is wrong with the returns of episodes for `return_range`; None if nothing is, or nothing reads it.

    Args:
        rows: whole episodes, one after another.
        config: gamma and the range, to which targets are clamped.
    """
    if config.return_range is None or config.algorithm not in WITH_Q:
        return None
    low, high = config.return_range
    returns = discount_returns(rows, config.gamma)
    excess = np.maximum(low - returns, returns - high)
    worst = int(np.argmax(excess))
    if excess[worst] <= ROUNDING * (high - low):
        return None
    return (
        f"a return of {returns[worst]:.6g}, expected {low:g} to {high:g}, to which targets are clamped; set "
        "off_policy.return_range to what its rewards can add up to, or to none"
    )


class Calibration:
    """Compares values with returns, and warns once for each time that they become impossible."""

    def __init__(self, config: OffPolicyConfig) -> None:
        self._config = config
        self._is_warned = self._has_warned_of_returns = False

    def warn_if_out_of_range(self, episodes: Sequence[np.ndarray]) -> None:
        """Log a warning once if new episodes earned what targets are clamped to be without."""
        if self._has_warned_of_returns:
            return
        for rows in episodes:
            if problem := describe_impossible_return(rows, self._config):
                self._has_warned_of_returns = True
                _log.warning("episode %d has %s.", rows["episode"][0], problem)
                return

    def compare(self, rows: np.ndarray, values: Tensor) -> dict[str, float]:
        """Compare the values of new episodes, before any of them was learnt from, with their returns.

        Args:
            rows: whole episodes, one after another.
            values: float32 [N], the critic's value of what was executed.

        Returns: means, and the correlation over rows if both vary.
        """
        found = values.numpy()
        returns = discount_returns(rows, self._config.gamma)
        metrics = {
            "critic/new_value_mean": float(found.mean()),
            "critic/new_return_mean": float(returns.mean()),
            "critic/new_value_error": float(np.abs(found - returns).mean()),
        }
        if found.std() > 0.0 and returns.std() > 0.0:
            metrics["critic/new_value_correlation"] = float(np.corrcoef(found, returns)[0, 1])
        return metrics

    def warn_if_impossible(self, metrics: dict[str, float]) -> None:
        """Log a warning if the mean value of the sampled actions left the range of returns."""
        mean, limits = metrics.get("critic/q_mean"), self._config.return_range
        if mean is None or limits is None:
            return
        low, high = limits
        margin = MARGIN * (high - low)
        is_possible = low - margin <= mean <= high + margin
        if not is_possible and not self._is_warned:
            _log.warning(
                "the critic's mean value is %.3g, but returns are between %g and %g: it extrapolates. "
                "Lower off_policy.q.last, raise off_policy.bc.last, or make fewer updates per decision; "
                "if returns can be larger, set off_policy.return_range.",
                mean,
                low,
                high,
            )
        self._is_warned = not is_possible
