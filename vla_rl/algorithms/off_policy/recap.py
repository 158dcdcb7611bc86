"""RECAP: a policy that reads in its prompt whether a step was better than expected.

    success, length ─► normalised returns ─► values are learnt ─► n-step advantages ─► smoothed ─► top share

RECAP (pi*0.6), Physical Intelligence 2025, arXiv:2511.14759. The label goes into the prompt ("Advantage:
positive"), all data are imitated with theirs, and the policy acts with the positive one, guided by it.
Numbers of the smoothing are verl-vla's. T control steps of one episode, N of all.

The value network answers with logits over bins that lie evenly between the least and the largest return.
It is trained as a classifier (Bellemare et al. 2017, arXiv:1707.06887; Farebrother et al. 2024,
arXiv:2403.03950), which noise in single returns moves less than a squared error.
"""

import math

import numpy as np

from vla_rl.algorithms.tensors import Tensor, full_precision, require_shape, torch


def normalised_returns(
    num_steps: int, *, is_success: bool, longest: int, failure_cost: float = 1.0
) -> np.ndarray:
    """Compute the returns of an episode that costs 1 a control step, and more if it fails.

        R_t = -(T - 1 - t) - [failed] * failure_cost * longest,  divided by (1 + failure_cost) * longest

    RECAP, arXiv:2511.14759, has a large constant for a failure. With verl-vla's scale, every
    step of a success of the longest episode is worth more than any of a failure.

    Args:
        num_steps: T, control steps of the episode, >= 1.
        is_success: whether it solved its task.
        longest: control steps of the task's longest stored episode, >= T.
        failure_cost: >= 0, in longest episodes.

    Returns: float32 [T], in [-1, 0]; rising. Raises: ValueError for numbers out of range.
    """
    if not 1 <= num_steps <= longest:
        raise ValueError(
            f"num_steps is {num_steps}, expected 1 to longest, {longest}: the task's longest episode."
        )
    if not failure_cost >= 0.0:
        raise ValueError(f"failure_cost is {failure_cost}, expected a number of at least 0.")
    to_go = np.arange(num_steps - 1, -1, -1, dtype=np.float64)
    cost = 0.0 if is_success else failure_cost * longest
    returns = -(to_go + cost) / ((1.0 + failure_cost) * longest)
    return returns.astype(np.float32)


def n_step_advantages(returns: np.ndarray, values: np.ndarray, *, num_steps: int) -> np.ndarray:
    """Compute how much better the next n control steps went than expected.

        A_t = (R_t - R_(t+n)) + V_(t+n) - V_t;   A_t = R_t - V_t if the episode ends before t + n

    RECAP, arXiv:2511.14759; n is 50 in verl-vla. The difference of two returns is the sum of the rewards
    between them. verl-vla takes the last step's value for what is beyond the end.

    Args:
        returns: float [T], undiscounted, of `normalised_returns`.
        values: float [T], their estimates.
        num_steps: n, >= 1.

    Returns: float32 [T]. Raises: ValueError for shapes that differ or n below 1.
    """
    if returns.ndim != 1 or returns.shape != values.shape:
        raise ValueError(
            f"returns are {list(returns.shape)}, values {list(values.shape)}; expected [T] of both."
        )
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, expected at least 1 control step.")
    advantages: np.ndarray = returns.astype(np.float64) - values
    later = np.arange(num_steps, len(returns))
    advantages[: len(later)] += values[later].astype(np.float64) - returns[later]
    return advantages.astype(np.float32)


def smooth_advantages(advantages: np.ndarray, *, decay: float, window: int) -> np.ndarray:
    """Average each advantage with those that follow it in its episode.

        S_t = sum_{k < window} decay^k A_(t+k) / sum_{k < window} decay^k,  over the steps that there are

    verl-vla, with a decay of 0.95 over 50 control steps: one good step among bad ones is noise.

    Args:
        advantages: float [T], of one episode.
        decay: in (0, 1].
        window: control steps, >= 1; 1 changes nothing.

    Returns: float32 [T]. Raises: ValueError for numbers out of range.
    """
    if not (0.0 < decay <= 1.0 and window >= 1):
        raise ValueError(
            f"decay is {decay}, window {window}; expected a decay above 0 and at most 1, and a "
            "window of at least 1 control step."
        )
    total, weights = np.zeros(len(advantages)), np.zeros(len(advantages))
    for offset in range(min(window, len(advantages))):
        rest = len(advantages) - offset
        total[:rest] += decay**offset * advantages[offset:]
        weights[:rest] += decay**offset
    smoothed: np.ndarray = total / weights
    return smoothed.astype(np.float32)


def label_advantages(
    scores: np.ndarray, tasks: np.ndarray, always: np.ndarray, *, positive_share: float
) -> np.ndarray:
    """Choose which control steps are called positive: the top share of each task, and some always.

    RECAP, arXiv:2511.14759: the threshold is each task's own, and whatever a person did is positive.
    verl-vla's share is 0.3, in its run on LIBERO 0.05.

    Args:
        scores: float [N], smoothed advantages of all stored control steps.
        tasks: int64 [N], id of the task of each.
        always: bool [N], steps of demonstrations and interventions: positive whatever their score. They
            are ranked with the others, so they may take the whole top share.
        positive_share: in [0, 1]; of each task, rounded up to a whole step.

    Returns: bool [N]. Of equal scores the first are chosen. Raises: ValueError for shapes that differ,
    scores that are not finite, or a share out of range.
    """
    if not (scores.ndim == 1 and scores.shape == tasks.shape == always.shape):
        shapes = [list(each.shape) for each in (scores, tasks, always)]
        raise ValueError(f"scores, tasks and always are {shapes}, expected [N] of each.")
    if not 0.0 <= positive_share <= 1.0:
        raise ValueError(f"positive_share is {positive_share}, expected a share from 0 to 1.")
    if not np.isfinite(scores).all():
        raise ValueError(
            "a score is NaN or infinite, expected finite advantages; the value network diverged, "
            "train it with a lower learning rate."
        )
    positive = always.astype(np.bool_)
    for task in np.unique(tasks):
        rows = np.flatnonzero(tasks == task)
        count = math.ceil(positive_share * len(rows))
        best = rows[np.argsort(-scores[rows], kind="stable")[:count]]
        positive[best] = True
    return positive


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
