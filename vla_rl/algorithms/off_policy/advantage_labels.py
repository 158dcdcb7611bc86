"""Labels of RECAP: which stored control steps were better than expected, for a policy that reads it.

    success, length ─► normalised returns ─► values are learnt ─► n-step advantages ─► smoothed ─► top share

RECAP (pi*0.6), Physical Intelligence 2025, arXiv:2511.14759. The label goes into the prompt ("Advantage:
positive"), all data are imitated with theirs, and the policy acts with the positive one. Numbers of the
smoothing are verl-vla's.

T control steps of one episode, N of all. NumPy alone.
"""

import math

import numpy as np


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
