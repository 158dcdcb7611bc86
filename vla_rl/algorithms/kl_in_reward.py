"""Penalty on the distance from the reference policy as part of the reward, and its weight. NumPy.

    token by token:  r_t -= coef * KL_t      before advantages are computed, so that it also counts for earlier tokens

Called by the reward node. The KL values are those of `vla_rl.algorithms.kl` for the weights that
acted.
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vla_rl.types import Config

MAX_RELATIVE_ERROR = 0.2
"""Largest relative error to which the adaptive coefficient reacts in one update."""


MIN_FACTOR = 0.5
"""Smallest factor on the adaptive coefficient in one update, whatever the number of samples: it
could not recover from 0."""


class KlRewardConfig(Config, frozen=True, kw_only=True):
    """Weight of the penalty: fixed, or adapted towards a target."""

    coef: float = 0.0
    """Weight of the penalty; the initial weight if `target` is set. 0 turns the penalty off."""

    target: float | None = None
    """Mean KL per token towards which the weight is adapted; none keeps the weight fixed."""

    average: Literal["tokens", "trajectories"] = "tokens"
    """Mean that is compared with `target`: over all tokens of the update, or over trajectories,
    each with the mean over its own tokens, so that a short one counts as much as a long one (verl,
    siiRL)."""

    horizon: int = 10_000
    """Number of samples over which the weight is adapted; larger values adapt more slowly."""

    def __post_init__(self) -> None:
        self.require(0.0 <= self.coef < float("inf"), "coef", "a finite weight >= 0")
        self.require(self.target is None or self.target > 0.0, "target", "above 0, or none")
        self.require(
            self.target is None or self.coef > 0.0, "coef", "above 0 if a target adapts it"
        )
        self.require(self.horizon >= 1, "horizon", "at least 1 sample")

    def unread(self) -> Mapping[str, str]:
        """Return the options of an adaptive weight, if the weight is fixed."""
        if self.target is not None:
            return {}
        return dict.fromkeys(("average", "horizon"), "kl_in_reward.target is none")


def penalised_rewards(
    step_rewards: NDArray[np.floating],
    kl: NDArray[np.floating],
    mask: NDArray[np.bool_],
    coef: float,
) -> tuple[NDArray[np.float64], float]:
    """Compute r_t - coef * KL_t (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).

    Args:
        step_rewards: float [N, S], 0 where masked; the outcome is on the last step that acted.
        kl: float [N, S], KL of each step; anything where masked.
        mask: bool [N, S], True where the policy acted.
        coef: weight of the penalty.

    Returns: float64 [N, S], 0 where masked, and the mean KL over unmasked steps (0 if there are
    none).
    Raises: ValueError for shapes that differ or a KL that is not finite.
    """
    if step_rewards.shape != mask.shape or kl.shape != mask.shape:
        raise ValueError(
            f"step_rewards is {list(step_rewards.shape)} and kl {list(kl.shape)}, expected "
            f"{list(mask.shape)} like mask."
        )
    used = np.where(mask, kl, 0.0).astype(np.float64)
    bad = np.argwhere(~np.isfinite(used))
    if len(bad):
        row, step = (int(index) for index in bad[0])
        raise ValueError(
            f"kl of trajectory {row} at step {step} is {kl[row, step]}, expected a finite number."
        )
    mean = float(used.sum() / max(int(mask.sum()), 1))
    return np.where(mask, step_rewards - coef * used, 0.0), mean


def mean_kl(
    kl: NDArray[np.floating],
    num_tokens: NDArray[np.number],
    average: Literal["tokens", "trajectories"],
) -> float:
    """Average the KL of an update over its tokens, or over the means of its trajectories.

    Args:
        kl: float [N], summed over the tokens of each trajectory.
        num_tokens: [N], how many those are; a trajectory without any does not count.
        average: `KlRewardConfig.average`.

    Returns: 0 if no trajectory has a token.
    """
    counts = np.asarray(num_tokens, dtype=np.float64)
    acted = counts > 0.0
    if not acted.any():
        return 0.0
    if average == "tokens":
        return float(kl[acted].sum() / counts[acted].sum())
    return float((kl[acted] / counts[acted]).mean())


def next_kl_coef(
    config: KlRewardConfig, coef: float, observed_kl: float, num_samples: int
) -> float:
    """Return the weight after an update; `config.coef` if it is fixed.

    Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

        coef * max(1 + clip(observed / target - 1, -0.2, 0.2) * num_samples / horizon, 0.5)

    Args:
        config: target and horizon.
        coef: the current weight, `config.coef` at first; it is the only state, so a checkpoint
            holds one number.
        observed_kl: mean KL per token of the update, from `mean_kl`.
        num_samples: number of trajectories of the update.
    """
    if config.target is None:
        return config.coef
    error = float(
        np.clip(observed_kl / config.target - 1.0, -MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR)
    )
    return coef * max(1.0 + error * num_samples / config.horizon, MIN_FACTOR)
