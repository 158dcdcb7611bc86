"""Entropy of a categorical policy, in nats."""

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.precision import full_precision


def entropy(logits: Tensor) -> Tensor:
    """Compute H = -sum_v p_v log p_v of softmax(logits) over the last axis.

    Args:
        logits: float [..., V], after temperature; -inf marks an impossible action and adds 0.

    Returns: float32 [...], of float64 logits float64, in [0, log V], with a gradient.
    """
    log_probs = torch.log_softmax(full_precision(logits), dim=-1)
    # 0 * log 0 is 0 in the limit; replacing -inf first keeps NaN out of value and gradient
    finite = torch.where(log_probs == -torch.inf, 0.0, log_probs)
    return -(log_probs.exp() * finite).sum(dim=-1)
