"""Validation of a language policy: several tries at each of a fixed set of starts, none of them trained on.

validation.jsonl in the run's folder: one line a weight version, with mean, best@n and maj@n; validation_conditions.json says
of which starts (files that they name go by their path), and how they are played
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from vla_rl.actors.waits import note_progress
from vla_rl.algorithms.validation import validation_metrics
from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import note_conditions_if_possible, refuse_other_conditions
from vla_rl.evaluation.playing import play_each
from vla_rl.evaluation.results import line_outlet, whole_lines
from vla_rl.observe import RunDirectory
from vla_rl.observe.outlet import Outlet
from vla_rl.observe.undone_lines import set_aside_lines
from vla_rl.rollout import AnyEngine, TaskStart
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Sampling, Trajectory, derive_seed


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a weight version did."""

    weight_version: int
    num_problems: int
    metrics: dict[str, float]


class Validation:
    """Plays the same episodes whenever it is asked; a `Judge` of a training run.

    Args:
        starts: the problems.
        num_tries: at each of them.
        agent: plays one episode.
        sampling: how the policy chooses; each try has a seed of its own, the same one every time.
        seed: of those.
    """

    def __init__(
        self, starts: Sequence[TaskStart], num_tries: int, agent: Agent, sampling: Sampling, seed: int = 0
    ) -> None:
        self._agent, self._num_problems = agent, len(starts)
        self._outlet: Outlet[bytes] | None = None
        problems = hashlib.sha256(msgspec.json.encode([(start.env, start.seed, start.options) for start in starts]))
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
        """Raises: ConfigError if the results in `run` are of other problems, or of other conditions."""
        refuse_other_conditions(_conditions_path(run), self._conditions)

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights that a run, which goes on from `version`, makes anew. Raises: OSError."""
        set_aside_lines(validation_path(run), lambda line: _is_of(line, version))

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: AnyEngine) -> None:
        """Play all of it, print the result and add it to `validation.jsonl`; a version that is there was played.

        A result that cannot be written is reported; the next one writes it too.
        Raises: ConfigError if results there are of other problems, or other conditions.
        """
        version, path = engine.weight_version, validation_path(run)
        note_conditions_if_possible(_conditions_path(run), self._conditions, path)
        if version in [result.weight_version for result in read_validation(path)]:
            return
        metrics = await self.play(pool, engine)
        result = ValidationResult(weight_version=version, num_problems=self._num_problems, metrics=metrics)
        if self._outlet is None:
            self._outlet = line_outlet(path)
        self._outlet.put(f"weights {version}", msgspec.json.encode(result) + b"\n")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
        print(f"validation of weights {version}, {self._num_problems} problems: {shown}", flush=True)

    async def play(self, pool: EnvPool, engine: AnyEngine) -> dict[str, float]:
        """Play all of it: metrics by name."""
        tries: defaultdict[int, dict[int, Trajectory]] = defaultdict(dict)

        async def done(trajectory: Trajectory) -> None:
            tries[trajectory.episode.group_id][trajectory.episode.member] = trajectory
            note_progress("validation")

        await play_each(pool, engine, self._agent, self._episodes, done)
        played = [[of_problem[member] for member in sorted(of_problem)] for _, of_problem in sorted(tries.items())]
        # of several agents, the mean of what they earned
        rewards = np.array(
            [[float(np.mean(list(each.returns_by_agent.values()))) for each in of_problem] for of_problem in played]
        )
        answers = [[str(each.info.get("last_reply", "")) for each in of_problem] for of_problem in played]
        return {
            **validation_metrics(rewards, answers),
            "success": float(np.mean([each.is_success for of_problem in played for each in of_problem])),
        }


def validation_path(run: RunDirectory) -> Path:
    """The file of a run's validation results."""
    return run.path / "validation.jsonl"


def _conditions_path(run: RunDirectory) -> Path:
    return run.path / "validation_conditions.json"


def read_validation(path: Path) -> list[ValidationResult]:
    """All results so far; a last line that was cut off by a kill is left out. Raises: ConfigError for damaged lines."""
    results = []
    for number, line in enumerate(whole_lines(path).splitlines(), start=1):
        try:
            results.append(msgspec.json.decode(line, type=ValidationResult))
        except (ValueError, RecursionError) as error:  # no JSON of a result, or bytes that are no text
            raise ConfigError(
                f"{path}, line {number} is not a result: {error}; remove that line, and its weights are validated again"
            ) from error
    return results


def _is_of(line: bytes, last: int) -> bool:
    try:
        return msgspec.json.decode(line, type=ValidationResult).weight_version <= last
    except (ValueError, RecursionError):  # which reading the file reports
        return True
