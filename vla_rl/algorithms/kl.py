"""Distance from the reference policy: estimators of the KL divergence, its penalty in the reward.

The estimators of KL(policy || reference) take the log-probs of sampled tokens (Schulman 2020,
"Approximating KL divergence"). All are elementwise on tensors of one shape; d = reference_log_prob -
log_prob, clamped to +-20. As a *value*, k1 and k3 are unbiased. As a *loss* on the policy's own samples
the gradients differ: k1's is 0 in expectation, k2's is the gradient of KL(policy || reference), k3's
that of KL(reference || policy). `k3_plus` has the value of k3 and the gradient of k2.

The penalty in the reward is computed in NumPy, by the reward node, with the KL of the weights that acted:

    token by token:  r_t -= coef * KL_t      before advantages are computed, so that it also counts for earlier tokens
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.tensors import Tensor, full_precision, torch
from vla_rl.types import FINITE, Config, PositiveFloat, PositiveInt, ReadIf

MAX_LOG_RATIO: Final = 20.0
MAX_K3: Final = 10.0
"""Upper bound of k3, without a gradient beyond. k3 grows exponentially, so one far token could
outweigh all others."""

KlEstimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Function from (log_prob, reference_log_prob) to an estimate for each token."""


def k1(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Compute -d: unbiased, high variance, may be negative."""
    return -_difference(log_prob, reference_log_prob)


def absolute(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Compute |d|: not an estimate of the divergence, but bounded in its gradient."""
    return _difference(log_prob, reference_log_prob).abs()


def k2(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Compute d**2 / 2: biased, low variance, >= 0; the gradient to use in a loss."""
    return 0.5 * _difference(log_prob, reference_log_prob).square()


def k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Compute min(exp(d) - d - 1, 10): unbiased up to the clamp, low variance, >= 0.

    The value to log.
    """
    difference = _difference(log_prob, reference_log_prob)
    # expm1 keeps small divergences: at d = 1e-4 k3 is 5e-9, far below the rounding of exp(d) in
    # float32, which is 6e-8
    return (difference.expm1() - difference).clamp(max=MAX_K3)


def k3_plus(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Compute sg(k3 - k2) + k2: the value of k3 with the gradient of k2 (straight-through).

    The one to use as a loss.
    """
    gradient = k2(log_prob, reference_log_prob)
    return k3(log_prob, reference_log_prob).detach() - gradient.detach() + gradient


def importance_weighted_k3(
    log_prob: Tensor, behavior_log_prob: Tensor, reference_log_prob: Tensor
) -> Tensor:
    """Compute rho * k3 with rho = exp(log_prob - behavior_log_prob), log rho clamped to +-20.

    It is unbiased for samples of older weights, with a gradient through both factors
    (DeepSeek-V3.2, arXiv:2512.02556).
    """
    # the gradient goes through the ratio too: with a constant weight the estimate would be unbiased
    # and its gradient would not
    log_ratio = full_precision(log_prob) - full_precision(behavior_log_prob.detach())
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * k3(log_prob, reference_log_prob)


def exact_kl(mean: Tensor, other_mean: Tensor, std: Tensor) -> Tensor:
    """Compute the divergence of two normal distributions with the same deviation, number by number.

        KL = (mean - other mean)^2 / (2 std^2)

    The transitions of one flow under two sets of weights are such, from the same state by the same step.

    Args:
        mean: float [B, T], with a gradient.
        other_mean: float [B, T], constant.
        std: float [B, 1]; where it is 0 there is no distribution, and the result is 0.
    """
    has_noise = std > 0.0
    distance = (mean - other_mean.detach()) / torch.where(has_noise, std, 1.0)
    return torch.where(has_noise, 0.5 * distance.square(), 0.0)


KL_ESTIMATORS: Final = MappingProxyType[str, KlEstimator](
    {"k1": k1, "abs": absolute, "k2": k2, "k3": k3, "k3_plus": k3_plus}
)
"""Estimators by the name that a config uses. A config may also name `importance_weighted_k3`, which
needs a third policy."""


def _difference(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    # exp(20) is 5e8, still finite in float32 when it is multiplied by a ratio; e^d of an unclamped
    # one overflows at 88
    difference = full_precision(reference_log_prob.detach()) - full_precision(log_prob)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


MAX_RELATIVE_ERROR = 0.2
"""Largest relative error to which the adaptive coefficient reacts in one update."""


MIN_FACTOR = 0.5
"""Smallest factor on the adaptive coefficient in one update, whatever the number of samples: it
could not recover from 0."""


class KlRewardConfig(Config, frozen=True, kw_only=True):
    """Weight of the penalty: fixed, or adapted towards a target."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("average", "horizon"), "target"),)

    coef: Annotated[float, msgspec.Meta(ge=0, le=FINITE)] = 0.0
    """Weight of the penalty; the initial weight if `target` is set. 0 turns the penalty off."""

    target: PositiveFloat | None = None
    """Mean KL per token towards which the weight is adapted; none keeps the weight fixed."""

    average: Literal["tokens", "trajectories"] = "tokens"
    """Mean that is compared with `target`: over all tokens of the update, or over trajectories,
    each with the mean over its own tokens, so that a short one counts as much as a long one (verl,
    siiRL)."""

    horizon: PositiveInt = 10_000
    """Number of samples over which the weight is adapted; larger values adapt more slowly."""

    def __post_init__(self) -> None:
        self.require(
            self.target is None or self.coef > 0.0, "coef", "above 0 if a target adapts it"
        )


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
    # a KL that is infinite, of a token that the reference may not choose, would make the whole
    # return of its episode infinite
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
    # verl and siiRL compare the mean over trajectories with the target; over tokens is what a KL
    # per token says
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
    # a bounded reaction: the KL of the first updates is far below any target, and an unbounded one
    # would drive the weight to nothing before it is needed
    error = float(
        np.clip(observed_kl / config.target - 1.0, -MAX_RELATIVE_ERROR, MAX_RELATIVE_ERROR)
    )
    return coef * max(1.0 + error * num_samples / config.horizon, MIN_FACTOR)
