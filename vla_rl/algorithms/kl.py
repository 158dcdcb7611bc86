"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

Schulman 2020, "Approximating KL divergence".

All are elementwise on tensors of one shape; d = reference_log_prob - log_prob, clamped to +-20. As
a *value*, k1 and k3 are unbiased. As a *loss* on the policy's own samples the gradients differ:
k1's is 0 in expectation, k2's is the gradient of KL(policy || reference), k3's that of KL(reference
|| policy). `k3_plus` has the value of k3 and the gradient of k2.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final, TypeAlias

from vla_rl.algorithms.lazy_torch import Tensor
from vla_rl.algorithms.precision import full_precision

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
    log_ratio = full_precision(log_prob) - full_precision(behavior_log_prob.detach())
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * k3(log_prob, reference_log_prob)


KL_ESTIMATORS: Final = MappingProxyType[str, KlEstimator](
    {"k1": k1, "abs": absolute, "k2": k2, "k3": k3, "k3_plus": k3_plus}
)
"""Estimators by the name that a config uses. A config may also name `importance_weighted_k3`, which
needs a third policy."""


def _difference(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    difference = full_precision(reference_log_prob.detach()) - full_precision(log_prob)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
