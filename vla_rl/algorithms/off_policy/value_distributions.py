"""Values as distributions over bins: the value network of RECAP, and guidance by its labels.

A value network answers with logits over N values that lie evenly between the least and the largest
return. It is trained as a classifier (Bellemare et al. 2017, arXiv:1707.06887; Farebrother et al. 2024,
arXiv:2403.03950), which noise in single returns moves less than a squared error.
"""

from vla_rl.algorithms.tensors import Tensor, full_precision, require_shape, torch


def spread_over_bins(returns: Tensor, num_bins: int, *, low: float, high: float) -> Tensor:
    """Turn returns into distributions over bins, between the two nearest of which each is divided.

        p_k + p_(k+1) = 1,   p_k z_k + p_(k+1) z_(k+1) = clamp(R, low, high)

    Two-hot targets of arXiv:2403.03950.

    Args:
        returns: float [B].
        num_bins: N, >= 2; 201 in RECAP.
        low: value of the first bin.
        high: value of the last bin, above `low`.

    Returns: float [B, N], rows add up to 1. Raises: ValueError for numbers out of range.
    """
    require_shape("returns", returns, (None,), "[B]")
    _require_bins(num_bins, low, high)
    position = (full_precision(returns).clamp(low, high) - low) / (high - low) * (num_bins - 1)
    below = position.floor().clamp(max=num_bins - 2)
    share = position - below
    index = below.long()[:, None]
    spread = torch.zeros(len(returns), num_bins, dtype=share.dtype, device=share.device)
    spread.scatter_(1, index, 1.0 - share[:, None])
    return spread.scatter_(1, index + 1, share[:, None])


def bin_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compare predicted distributions with their targets: cross-entropy, a mean over rows.

        L = -mean_b sum_k p_bk log softmax(logits_b)_k

    RECAP, arXiv:2511.14759.

    Args:
        logits: float [B, N], the only input with a gradient.
        targets: float [B, N], of `spread_over_bins`.

    Returns: float []. Raises: ValueError for shapes that differ or no row.
    """
    require_shape("logits", logits, (None, None), "[B, N]")
    require_shape("targets", targets, tuple(logits.shape), "[B, N]")
    if logits.shape[0] < 1:
        raise ValueError("the batch has no row; expected at least one; skip the step instead.")
    log_probs = torch.log_softmax(full_precision(logits), dim=1)
    return -(targets.detach() * log_probs).sum(dim=1).mean()


def expected_values(logits: Tensor, *, low: float, high: float) -> Tensor:
    """Compute the mean of predicted distributions.

    Args:
        logits: float [B, N], of bins from `low` to `high`.
        low: value of the first bin.
        high: value of the last bin.

    Returns: float [B].
    """
    require_shape("logits", logits, (None, None), "[B, N]")
    _require_bins(logits.shape[1], low, high)
    probabilities = torch.softmax(full_precision(logits), dim=1)
    bins = torch.linspace(low, high, logits.shape[1], device=logits.device)
    return probabilities @ bins.to(probabilities.dtype)


def guide(conditioned: Tensor, plain: Tensor, weight: float) -> Tensor:
    """Move a prediction further in the direction that its condition gives it.

        v = plain + weight (conditioned - plain)

    Classifier-free guidance (Ho and Salimans 2022, arXiv:2207.12598), for flows by velocities. RECAP,
    arXiv:2511.14759: weights above 1 sharpen the policy towards what is called positive.

    Args:
        conditioned: float [...], the prediction with the label.
        plain: float [...], the same without.
        weight: 0: plain, 1: conditioned.

    Returns: float [...].
    """
    return plain + weight * (conditioned - plain)


def _require_bins(num_bins: int, low: float, high: float) -> None:
    if num_bins < 2 or not low < high:
        raise ValueError(
            f"{num_bins} bins from {low} to {high}; expected at least 2, and the lower value first."
        )
