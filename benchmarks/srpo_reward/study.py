"""Score how well rewards rank failures: every rule on the same episodes, encoder by encoder."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from benchmarks.srpo_reward.episodes import Episode, as_groups
from vla_rl.algorithms import SrpoConfig, TrajectoryEncoder, srpo_rewards
from vla_rl.types import Group, Trajectory

RULES: Final[Mapping[str, SrpoConfig]] = {
    "ours": SrpoConfig(rule="aligned"),
    "paper": SrpoConfig(rule="paper"),
    "released_own_videos": SrpoConfig(rule="released"),
    "released": SrpoConfig(rule="released"),
}
"""The compared rules. `released` is the behaviour of the released code: all members of a group
share one video a prompt."""

HEADLINES: Final = ("ours", "paper", "released")


class Score(msgspec.Struct, frozen=True):
    """The quality of one rule's rewards."""

    spearman: float
    """Rank correlation of reward and true progress (in tenths) among a task's failures; mean over
    tasks, by their number of failures. Rewards that are all equal count as 0."""

    spearman_in_group: float
    """The same within groups, as group-relative advantages use it; mean over groups of 3 failures
    or more."""

    distinct_failures: float
    """Share of the mixed groups with 2 failures or more in which not all failures get the same
    reward."""


class Batch(msgspec.Struct, frozen=True):
    """All episodes as one update, group by group."""

    groups: list[Group]
    tasks: list[str]
    group_ids: np.ndarray
    is_success: np.ndarray

    progress: np.ndarray
    """float64 [N], true progress in tenths: the measure is not more precise."""


def batch_of(episodes: list[Episode]) -> Batch:
    """Return the recorded episodes as the groups of one update."""
    pairs = as_groups(episodes)
    members = [episode for _, of_group in pairs for episode in of_group]
    return Batch(
        groups=[group for group, _ in pairs],
        tasks=[episode.task for episode in members],
        group_ids=np.concatenate([[group.group_id] * len(of_group) for group, of_group in pairs]),
        is_success=np.array([episode.is_success for episode in members]),
        progress=np.round([episode.furthest for episode in members], 1),
    )


async def scores_of(batch: Batch, encoder: TrajectoryEncoder) -> dict[str, Score]:
    """Return every rule's score with one encoder."""
    own = np.concatenate([await encoder.embed(group.trajectories) for group in batch.groups])
    shared = np.concatenate([await _shared_embedding(group, encoder) for group in batch.groups])
    return {
        name: score(
            batch,
            srpo_rewards(
                shared if name == "released" else own, batch.is_success, batch.tasks, rule
            ),
        )
        for name, rule in RULES.items()
    }


def figures_of(scores: Mapping[str, Mapping[str, Score]]) -> dict[str, float]:
    """Return the figures of the JSON line."""
    headline = scores["pixels"]
    return {
        **{f"spearman_{rule}": headline[rule].spearman for rule in HEADLINES},
        **{f"distinct_failures_{rule}": headline[rule].distinct_failures for rule in HEADLINES},
        **{
            f"{encoder}/{rule}/{key}": value
            for encoder, by_rule in scores.items()
            for rule, of_rule in by_rule.items()
            for key, value in msgspec.structs.asdict(of_rule).items()
        },
    }


def score(batch: Batch, rewards: np.ndarray) -> Score:
    """Compare rewards, float32 [N], with the true progress of the failures."""
    failed = ~batch.is_success
    tasks = np.array(batch.tasks)
    by_task = [failed & (tasks == task) for task in dict.fromkeys(batch.tasks)]
    by_group = [failed & (batch.group_ids == group.group_id) for group in batch.groups]
    is_mixed = [
        group.success_rate > 0 and rows.sum() >= 2
        for group, rows in zip(batch.groups, by_group, strict=True)
    ]
    mixed = [rows for rows, wanted in zip(by_group, is_mixed, strict=True) if wanted]
    comparable = [rows for rows in by_group if rows.sum() >= 3 and np.ptp(batch.progress[rows]) > 0]

    def correlate(rows: np.ndarray) -> float:
        return _spearman(rewards[rows], batch.progress[rows])

    return Score(
        spearman=float(
            np.average(
                [correlate(rows) for rows in by_task], weights=[rows.sum() for rows in by_task]
            )
        ),
        spearman_in_group=float(np.mean([correlate(rows) for rows in comparable])),
        distinct_failures=float(np.mean([np.ptp(rewards[rows]) > 1e-6 for rows in mixed])),
    )


def _spearman(rewards: np.ndarray, progress: np.ndarray) -> float:
    if len(rewards) < 2 or np.ptp(rewards) <= 1e-6 or np.ptp(progress) == 0:
        return 0.0
    from scipy.stats import spearmanr  # here: its import takes a second, and few need it

    return float(spearmanr(rewards, progress).statistic)


async def _shared_embedding(group: Group, encoder: TrajectoryEncoder) -> np.ndarray:
    """Return the released code's embedding: frames of all members collected under the prompt's
    name, moment after moment.
    """
    embedding = await encoder.embed([interleaved(group.trajectories)])
    return np.repeat(embedding, len(group.trajectories), axis=0)


def interleaved(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Merge all members' observations into one trajectory: first those of the first moment, member
    by member, and so on.
    """
    observations = [
        [*(step.observation for step in trajectory.steps), trajectory.final_observation]
        for trajectory in trajectories
    ]
    mixed = [
        seen[moment]
        for moment in range(max(map(len, observations)))
        for seen in observations
        if moment < len(seen)
    ]
    first = trajectories[0]
    steps = tuple(msgspec.structs.replace(first.steps[0], observation=seen) for seen in mixed[:-1])
    return msgspec.structs.replace(first, steps=steps, final_observation=mixed[-1])
