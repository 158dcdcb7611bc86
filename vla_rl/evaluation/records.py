"""Records of evaluated episodes: who ran what from where, and what it was worth.

One record serves evaluations of a checkpoint, held-out episodes of a training run that succeed or
fail, those that are scored, and validations of a language policy with several tries of each problem.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec, EpisodeSpec, Trajectory

Measure: TypeAlias = Literal["success_rate", "score", "reward"]
"""Name of the mean of `EpisodeRecord.value`."""

Key: TypeAlias = tuple[str, int, int, int]
"""Task, start, scene seed and member: what no two records of one weight version share."""


class RecordFormat(NamedTuple):
    """A file of records in the folder of a run, and their measure.

    Example:
        RecordFormat(file="held_out.jsonl", measure="success_rate")
    """

    file: str
    measure: Measure


EPISODES: Final = RecordFormat("episodes.jsonl", "success_rate")
SUCCESSES: Final = RecordFormat("held_out.jsonl", "success_rate")
SCORES: Final = RecordFormat("held_out_scores.jsonl", "score")
VALIDATION: Final = RecordFormat("validation.jsonl", "reward")


def choosing_format(format: RecordFormat) -> RecordFormat:
    """Return the format of the records on the starts that choose: a file of their own."""
    # another file and not a field: a reader of the reported results must not find the others in it
    name = Path(format.file)
    return format._replace(file=f"{name.stem}_choose{name.suffix}")


class EpisodeRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Worth of one episode.

    Example:
        >>> EpisodeRecord(task="libero_goal/7", start=40, seed=0, weights=20, member=0, value=1.0,
        ...               parts={"steps": 87.0, "attempts": 1.0}, instruction="turn on the stove")
    """

    task: str
    """Name of the task; empty in records of scores that were written up to 24320b8d."""

    start: int
    """Number of the start: the initial state, or the seed of an environment that has none."""

    seed: int
    """Seed of the scene; 0 in benchmarks whose starts leave nothing open."""

    weights: int
    """Version of the weights that acted; 0 in the evaluation of a checkpoint."""

    member: int
    """Number of the try, if a start is tried several times."""

    value: float
    """1 for a success and 0 for a failure, or the episode's score, or its reward."""

    parts: dict[str, float]
    """Parts of the score. Where successes count: `steps`, the control steps without those in which the
    scene settles, and `attempts`, more than 1 if a simulator died or froze."""

    instruction: str = ""
    perturbation: str = ""
    """Change of the task by LIBERO-PRO or LIBERO-plus; empty for LIBERO's own tasks."""

    answer: str = ""
    """Digest of a conversation's last reply, by which equal answers of several tries are counted."""

    @property
    def suite(self) -> str:
        """Suite of the task; a task without a number, such as `CartPole-v1`, is a suite of its own."""
        suite, _, number = self.task.rpartition("/")
        return suite if number.isdecimal() else self.task

    @property
    def task_id(self) -> int:
        """Number of the task in its suite."""
        number = self.task.rpartition("/")[2]
        return int(number) if number.isdecimal() else 0

    @property
    def is_success(self) -> bool:
        """Whether the task was solved, where successes count."""
        return self.value >= 1.0

    @property
    def num_steps(self) -> int:
        """Number of control steps, where successes count."""
        return int(self.parts["steps"])

    @property
    def episode_key(self) -> Key:
        """Identity of the episode among those of one weight version."""
        return self.task, self.start, self.seed, self.member


def make_record(
    trajectory: Trajectory, measure: Measure = "success_rate", *, weights: int = 0
) -> EpisodeRecord:
    """Return the record of an episode.

    Raises: ConfigError if scores count and its environment did not grade it.
    """
    episode, info = trajectory.episode, trajectory.info
    if measure == "reward":
        # with several agents, the mean of their rewards
        reward = float(np.mean(list(trajectory.returns_by_agent.values())))
        reply = str(info.get("last_reply", ""))
        return _record(
            trajectory,
            weights,
            start=episode.group_id,
            member=episode.member,
            value=reward,
            # the reward alone does not say it: one below 1 may be a success
            parts={"success": float(trajectory.is_success)},
            answer=hashlib.blake2b(reply.encode(), digest_size=8).hexdigest(),
        )
    if measure == "score":
        score = info.get("score")
        if not isinstance(score, dict):
            raise ConfigError(
                f"{episode.env.id} ended an episode without info['score'], expected a number for each "
                "part of its score"
            )
        parts = {name: float(value) for name, value in score.items()}
        return _record(trajectory, weights, value=parts.pop("total"), parts=parts)
    return _record(
        trajectory,
        weights,
        start=int(info.get("init_state_id", start_number(episode))),
        seed=int(info.get("scene_seed", 0)),
        value=float(trajectory.is_success),
        parts={"steps": float(trajectory.num_env_steps), "attempts": float(episode.attempt + 1)},
    )


def _record(trajectory: Trajectory, weights: int, **fields: Any) -> EpisodeRecord:
    episode = trajectory.episode
    words = trajectory.final_observation.get("instruction")
    change = trajectory.info.get("perturbation")
    known = {"start": start_number(episode), "seed": 0, "member": 0}
    return EpisodeRecord(
        task=episode.task,
        weights=weights,
        instruction=words if isinstance(words, str) else "",
        perturbation=change if isinstance(change, str) else "",
        **{**known, **fields},
    )


def start_number(episode: EpisodeSpec) -> int:
    """Return the number of an episode's start, or its seed if its start has no number."""
    number: int = episode.options.get("init_state_id", episode.seed)
    return number


def episode_key(episode: EpisodeSpec, measure: Measure = "success_rate") -> Key:
    """Return the key that the record of an episode will have."""
    if measure == "reward":
        return episode.task, episode.group_id, 0, episode.member
    if measure == "score":
        return "", start_number(episode), 0, 0
    return episode.task, start_number(episode), _scene_seed(episode.env), 0


def record_key(record: EpisodeRecord, measure: Measure) -> Key:
    """Return the key of a record as `episode_key` does."""
    # scores are told apart by their start alone: those of 24320b8d name no task
    return ("", record.start, 0, 0) if measure == "score" else record.episode_key


def _scene_seed(env: EnvSpec) -> int:
    seed: int = env.kwargs.get("scene_seed", 0)
    return seed


def group_by_weights(records: Iterable[EpisodeRecord]) -> dict[int, list[EpisodeRecord]]:
    """Group records by weight version, from the first to the last."""
    grouped: dict[int, list[EpisodeRecord]] = {}
    for record in sorted(records, key=lambda record: record.weights):
        grouped.setdefault(record.weights, []).append(record)
    return grouped


def group_by_task(records: Sequence[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
    """Group records by task: suites in order of appearance, tasks in LIBERO's order."""
    suites = list(dict.fromkeys(record.suite for record in records))
    grouped: dict[str, list[EpisodeRecord]] = {}
    for record in sorted(records, key=lambda each: (suites.index(each.suite), each.task_id)):
        grouped.setdefault(record.task, []).append(record)
    return grouped


def group_by_perturbation(records: Iterable[EpisodeRecord]) -> Mapping[str, list[EpisodeRecord]]:
    """Group records by kind of perturbation, in order of appearance, without unperturbed tasks."""
    grouped: dict[str, list[EpisodeRecord]] = {}
    for record in records:
        if record.perturbation:
            grouped.setdefault(record.perturbation, []).append(record)
    return grouped
