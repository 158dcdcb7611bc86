"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (Schulman 2020, "Approximating KL divergence").

All are elementwise on tensors of one shape; d = reference_log_prob - log_prob, clamped to +-20. As a *value*, k1 and k3
are unbiased. As a *loss* on the policy's own samples the gradients differ: k1's is 0 in expectation, k2's is the gradient
of KL(policy || reference), k3's that of KL(reference || policy).
"""

from types import MappingProxyType
from typing import Final

from torch import Tensor

MAX_LOG_RATIO = 20.0


def k1(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """-d: unbiased, high variance, may be negative."""
    return -_difference(log_prob, reference_log_prob)


def k2(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """d**2 / 2: biased, low variance, >= 0; the one to use as a loss."""
    return 0.5 * _difference(log_prob, reference_log_prob).square()


def k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """exp(d) - d - 1: unbiased, low variance, >= 0; the one to log. Not clamped further, unlike in other systems."""
    difference = _difference(log_prob, reference_log_prob)
    return difference.expm1() - difference


KL_ESTIMATORS: Final = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
"""Estimators by the name that a config uses."""


def _difference(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    return (reference_log_prob - log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
