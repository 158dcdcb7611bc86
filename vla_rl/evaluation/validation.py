"""Validation of a language policy: a fixed set of problems that are never trained on, several tries of
each.

The metrics of a weight version are the mean reward, best@n and maj@n. validation.jsonl in the run's
folder has one record per try. validation_conditions.json identifies the problems (by the paths, not the
content, of files that they name) and holds the sampling settings.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.record_file import RecordFile
from vla_rl.evaluation.records import VALIDATION, EpisodeRecord, group_by_weights
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import TaskStart
from vla_rl.types import Agent, EpisodeSpec, Sampling, derive_seed


class Validation(HeldOutEvaluator):
    """Runs the same tries of each problem for each weight version.

    Args:
        starts: the problems.
        num_tries: episodes of each problem.
        agent: runs one episode.
        sampling: how the policy chooses actions. Each episode has its own seed, the same at each
            call.
        seed: seed from which those are derived.
    """

    conditions_file = "validation_conditions.json"
    what = "validation"

    def __init__(
        self,
        starts: Sequence[TaskStart],
        num_tries: int,
        agent: Agent,
        sampling: Sampling,
        seed: int = 0,
    ) -> None:
        # results of other problems must not stand in one curve, so their digest is a condition
        problems = hashlib.sha256(
            msgspec.json.encode([(start.env, start.seed, start.options) for start in starts])
        )
        episodes = [
            EpisodeSpec(
                episode_id=number * num_tries + member,
                group_id=number,
                member=member,
                env=start.env,
                task=start.task,
                seed=start.seed,
                policy_seed=derive_seed(seed, "validation", number, member),
                options=start.options,
                sampling=sampling,
            )
            for number, start in enumerate(starts)
            for member in range(num_tries)
        ]
        conditions = {
            "num_problems": len(starts),
            "num_tries": num_tries,
            "greedy": sampling.greedy,
            "temperature": sampling.temperature,
            "seed": seed,
            "problems": problems.hexdigest()[:12],
        }
        super().__init__(episodes, format=VALIDATION, agent=agent, conditions=conditions)

    def print_results(self, file: RecordFile, weights: int, *, num_new: int) -> None:
        """Print the metrics of the newest weights, unless they were validated before."""
        if num_new == 0:
            return
        records = [record for record in file.records if record.weights == weights]
        metrics = compute_metrics(records)
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        num_problems = len({record.start for record in records})
        print(f"validation of weights {weights}, {num_problems} problems: {shown}", flush=True)


def validation_path(run: RunDirectory) -> Path:
    """Return the file of a run's validation."""
    return run.path / VALIDATION.file


def read_validation(path: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of each weight version so far, in order.

    Raises: ConfigError for damaged lines.
    """
    file = RecordFile(path, VALIDATION.measure)
    of_weights = group_by_weights(file.records)
    most = max(map(len, of_weights.values()), default=0)
    # a version whose validation was stopped has some tries alone
    found = {
        weights: compute_metrics(records)
        for weights, records in of_weights.items()
        if len(records) == most
    }
    return dict(sorted((found | file.summaries).items()))


def compute_metrics(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Compute `validation_metrics` and the success rate of one weight version's tries.

    Problems whose tries are not all there, because the validation was stopped, do not count unless all
    are so.
    """
    tries: dict[tuple[str, int], list[EpisodeRecord]] = {}
    for record in sorted(records, key=lambda record: (record.start, record.member)):
        tries.setdefault((record.task, record.start), []).append(record)
    # best@m over problems with fewer tries would be smaller for no other reason
    most = max(map(len, tries.values()))
    whole = [found for found in tries.values() if len(found) == most]
    rewards = np.array([[record.value for record in found] for found in whole])
    answers = [[record.answer for record in found] for found in whole]
    successes = [record.parts["success"] for found in whole for record in found]
    return {**validation_metrics(rewards, answers), "success": float(np.mean(successes))}


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
    weights = np.array([math.comb(rank, num - 1) for rank in range(num_tries)]) / math.comb(
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
        # `most_common` keeps the order of counting, so the first of equally frequent ones counts
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
