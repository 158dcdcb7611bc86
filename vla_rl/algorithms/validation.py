"""Metrics of several tries at the same problems: mean, best, and the majority's answer."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def mean_best_reward(rewards: NDArray[np.floating], num: int) -> float:
    """Compute the mean over problems of the expected best reward among `num` tries.

    The tries are drawn without replacement.

        best@m = mean over problems of sum_i r_(i) C(i-1, m-1) / C(n, m),   r_(1) <= ... <= r_(n)

    For rewards of 0 and 1 it is pass@m (Chen et al. 2021, arXiv:2107.03374, eq. 1).

    Args:
        rewards: float [problems, n].
        num: m, 1 <= m <= n.

    Raises: ValueError for another m, or no problems.
    """
    num_problems, num_tries = _checked(rewards)
    if not 1 <= num <= num_tries:
        raise ValueError(f"best@{num} of {num_tries} tries, expected 1 to {num_tries}.")
    weights = np.array([math.comb(place, num - 1) for place in range(num_tries)]) / math.comb(
        num_tries, num
    )
    return float((np.sort(rewards, axis=1) * weights).sum() / num_problems)


def mean_majority_reward(rewards: NDArray[np.floating], answers: Sequence[Sequence[str]]) -> float:
    """Compute the mean reward of each problem's most frequent answer.

    If answers are equally frequent, the one that came first counts.

    Args:
        rewards: float [problems, n].
        answers: n texts for each problem.
    """
    _checked(rewards)
    chosen = []
    for earned, given in zip(rewards.tolist(), answers, strict=True):
        most_common = Counter(given).most_common(1)[0][0]
        same = [
            reward for reward, answer in zip(earned, given, strict=True) if answer == most_common
        ]
        chosen.append(sum(same) / len(same))
    return float(np.mean(chosen))


def validation_metrics(
    rewards: NDArray[np.floating], answers: Sequence[Sequence[str]] | None = None
) -> dict[str, float]:
    """Compute `mean`, `best@m` for m = 2, 4, 8, ... and n, and `maj@n` if answers are known.

    Args:
        rewards: float [problems, n].
        answers: n texts for each problem, or None.
    """
    _, num_tries = _checked(rewards)
    sizes = sorted({2**power for power in range(1, num_tries.bit_length())} | {num_tries} - {1})
    metrics = {
        "mean": float(rewards.mean()),
        **{f"best@{num}": mean_best_reward(rewards, num) for num in sizes},
    }
    if answers is not None:
        metrics[f"maj@{num_tries}"] = mean_majority_reward(rewards, answers)
    return metrics


def _checked(rewards: NDArray[np.floating]) -> tuple[int, int]:
    if rewards.ndim != 2 or 0 in rewards.shape:
        raise ValueError(
            f"rewards are {list(rewards.shape)}, expected [problems, tries], at least one of each."
        )
    return rewards.shape[0], rewards.shape[1]
