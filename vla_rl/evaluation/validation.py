"""Validation of a language policy on a fixed set of starts that are never trained on.

Several episodes are run from each.

validation.jsonl in the run's folder has one line per weight version, with mean, best@n and maj@n.
validation_conditions.json identifies the starts (by the paths, not the content, of files that they
name) and holds the sampling settings.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import refuse_other_conditions, try_to_record_conditions
from vla_rl.evaluation.results import complete_lines, line_writer
from vla_rl.evaluation.run_episodes import run_each
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import RetryingWriter, set_aside_lines
from vla_rl.rollout import AnyEngine, TaskStart
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Sampling, Trajectory, derive_seed
from vla_rl.util.stalls import note_progress


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of a weight version."""

    weight_version: int
    num_problems: int
    metrics: dict[str, float]


class Validation:
    """Runs the same episodes at each call; a `PolicyEvaluator` of a training run.

    Args:
        starts: the problems.
        num_tries: episodes of each problem.
        agent: runs one episode.
        sampling: how the policy chooses actions. Each episode has its own seed, the same at each
            call.
        seed: seed from which those are derived.
    """

    def __init__(
        self,
        starts: Sequence[TaskStart],
        num_tries: int,
        agent: Agent,
        sampling: Sampling,
        seed: int = 0,
    ) -> None:
        self._agent, self._num_problems = agent, len(starts)
        self._outlet: RetryingWriter[bytes] | None = None
        problems = hashlib.sha256(
            msgspec.json.encode([(start.env, start.seed, start.options) for start in starts])
        )
        self._conditions = {
            "num_problems": len(starts),
            "num_tries": num_tries,
            "greedy": sampling.greedy,
            "temperature": sampling.temperature,
            "seed": seed,
            "problems": problems.hexdigest()[:12],
        }
        self._episodes = [
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

    def check(self, run: RunDirectory) -> None:
        """Check the results in `run`.

        Raises: ConfigError if their problems or conditions differ.
        """
        refuse_other_conditions(_conditions_path(run), self._conditions)

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights after `version`, which a resumed run makes again.

        Raises: OSError.
        """
        set_aside_lines(validation_path(run), lambda line: _is_of(line, version))

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: AnyEngine) -> None:
        """Run all episodes, print the result and add it to `validation.jsonl`.

        Does nothing if the file has this weight version already.

        A result that cannot be written is reported and written with the next one.
        Raises: ConfigError if the problems or conditions of earlier results differ.
        """
        version, path = engine.weight_version, validation_path(run)
        try_to_record_conditions(_conditions_path(run), self._conditions, path)
        if version in [result.weight_version for result in read_validation(path)]:
            return
        metrics = await self.run_problems(pool, engine)
        result = ValidationResult(
            weight_version=version, num_problems=self._num_problems, metrics=metrics
        )
        if self._outlet is None:
            self._outlet = line_writer(path)
        self._outlet.put(f"weights {version}", msgspec.json.encode(result) + b"\n")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        print(
            f"validation of weights {version}, {self._num_problems} problems: {shown}", flush=True
        )

    async def run_problems(self, pool: EnvPool, engine: AnyEngine) -> dict[str, float]:
        """Run all episodes; return metrics by name."""
        tries: defaultdict[int, dict[int, Trajectory]] = defaultdict(dict)

        async def done(trajectory: Trajectory) -> None:
            tries[trajectory.episode.group_id][trajectory.episode.member] = trajectory
            note_progress("validation")

        await run_each(pool, engine, self._agent, self._episodes, done)
        trajectories = [
            [of_problem[member] for member in sorted(of_problem)]
            for _, of_problem in sorted(tries.items())
        ]
        # with several agents, the mean of their rewards
        rewards = np.array(
            [
                [float(np.mean(list(each.returns_by_agent.values()))) for each in of_problem]
                for of_problem in trajectories
            ]
        )
        answers = [
            [each.info.get("last_reply", "") for each in of_problem] for of_problem in trajectories
        ]
        return {
            **validation_metrics(rewards, answers),
            "success": float(
                np.mean([each.is_success for of_problem in trajectories for each in of_problem])
            ),
        }


def validation_path(run: RunDirectory) -> Path:
    """Return the file of a run's validation results."""
    return run.path / "validation.jsonl"


def _conditions_path(run: RunDirectory) -> Path:
    return run.path / "validation_conditions.json"


def read_validation(path: Path) -> list[ValidationResult]:
    """Read all results so far, without a last line that a kill cut off.

    Raises: ConfigError for damaged lines.
    """
    results = []
    for number, line in enumerate(complete_lines(path).splitlines(), start=1):
        try:
            results.append(msgspec.json.decode(line, type=ValidationResult))
        except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
            raise ConfigError(
                f"{path}, line {number} is not a result: {error}; remove that line, and its "
                "weights are validated again"
            ) from error
    return results


def _is_of(line: bytes, last: int) -> bool:
    try:
        return msgspec.json.decode(line, type=ValidationResult).weight_version <= last
    except (ValueError, RecursionError):  # reported when the file is read
        return True


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
