"""Rewards of recorded trajectories as a `RewardBatch`.

A step of it is a decision, a control step or a token.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.reward_batch import Floats, RewardBatch
from vla_rl.types import Step, Trajectory, agents_of

StepLevel: TypeAlias = Literal["chunk", "action", "token"]
"""Unit with an advantage of its own: a decision, an executed control step, or a token of one."""


def reward_batch_of(
    trajectories: Sequence[Trajectory],
    rewards: Floats | None = None,
    *,
    level: StepLevel = "chunk",
    step_rewards: Sequence[Floats] | None = None,
    values: Sequence[Floats] | None = None,
    final_values: Floats | None = None,
    greedy_rewards: Floats | None = None,
) -> RewardBatch:
    """Collect everything that an estimator may need from trajectories.

    Only executed control steps count: the batch ends at the exact control step that ended the
    episode. At the level "chunk" a step's reward is the sum over its control steps; at "token" a
    control step's last token gets its reward and duration.

    Args:
        trajectories: N trajectories, all groups of the update.
        rewards: float [N], their outcomes; None takes the sums of the step rewards.
        level: unit of a step.
        step_rewards: N arrays float [steps]; None takes the environment's, unless `rewards` are
            given.
        values: N arrays float [steps], the critic's estimate before each step.
        final_values: float [N], its estimate for each final observation.
        greedy_rewards: float [N], for ReMax.

    Raises: ValueError for sizes that do not fit, naming the episode.
    """
    parts = [[_by_level(step, level) for step in trajectory.steps] for trajectory in trajectories]
    durations = [_joined([durations_of for _, durations_of in part]) for part in parts]
    if step_rewards is None and rewards is None:
        step_rewards = [_joined([rewards_of for rewards_of, _ in part]) for part in parts]
    by_step = (
        None
        if step_rewards is None
        else _checked(step_rewards, durations, trajectories, "step_rewards")
    )
    outcomes = [float(row.sum()) for row in by_step or ()] if rewards is None else rewards
    episodes = [trajectory.episode for trajectory in trajectories]
    return RewardBatch(
        rewards=np.asarray(outcomes, dtype=np.float64),
        group=np.array([episode.group_id for episode in episodes], dtype=np.int64),
        episode_ids=np.array([episode.episode_id for episode in episodes], dtype=np.int64),
        mask=_padded([np.ones(len(row)) for row in durations]).astype(np.bool_),
        step_rewards=None if by_step is None else _padded(by_step),
        values=None
        if values is None
        else _padded(_checked(values, durations, trajectories, "values")),
        final_values=None if final_values is None else np.asarray(final_values),
        is_terminated=np.array(
            [not each.stop_reason.is_cut_off for each in trajectories], dtype=np.bool_
        ),
        durations=_padded(durations).astype(np.int64),
        num_tokens=np.array(
            [trajectory.num_executed_tokens for trajectory in trajectories], dtype=np.float64
        ),
        greedy_rewards=None if greedy_rewards is None else np.asarray(greedy_rewards),
        agents=_agents(trajectories, level),
    )


def _agents(trajectories: Sequence[Trajectory], level: StepLevel) -> NDArray[np.int64]:
    """Return int64 [N, S], the agent that decided each step.

    It is an index in the sorted names of all deciding agents.
    """
    number_of = {name: number for number, name in enumerate(sorted(agents_of(trajectories)))}
    rows = [
        [number_of[step.agent] for step in trajectory.steps for _ in _by_level(step, level)[1]]
        for trajectory in trajectories
    ]
    return _padded([np.array(row, np.float64) for row in rows]).astype(np.int64)


def _by_level(step: Step, level: StepLevel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rewards and durations of one decision's steps, float64 [number of steps]."""
    rewards = np.asarray(step.rewards, dtype=np.float64)
    if level == "chunk":
        return np.array([rewards.sum()]), np.array([float(len(rewards))])
    if level == "action":
        return rewards, np.ones(len(rewards))
    last = np.zeros((len(rewards), step.chunk.tokens_per_step))
    last[:, -1] = 1.0
    return (last * rewards[:, None]).reshape(-1), last.reshape(-1)


def _joined(rows: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate(rows) if rows else np.zeros(0)


def _padded(rows: Sequence[NDArray[np.floating]]) -> NDArray[np.float64]:
    padded = np.zeros((len(rows), max((len(row) for row in rows), default=0)))
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def _checked(
    rows: Sequence[Floats],
    steps: Sequence[NDArray[np.float64]],
    trajectories: Sequence[Trajectory],
    name: str,
) -> Sequence[Floats]:
    if len(rows) != len(trajectories):
        raise ValueError(
            f"{len(rows)} arrays of {name} for {len(trajectories)} trajectories, expected one each."
        )
    for row, step, trajectory in zip(rows, steps, trajectories, strict=True):
        if row.shape != step.shape:
            raise ValueError(
                f"{name} of episode {trajectory.episode.episode_id} are {list(row.shape)}, "
                f"expected {list(step.shape)}: one for each step of the level."
            )
    return rows
