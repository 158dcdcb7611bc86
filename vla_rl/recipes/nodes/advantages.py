"""The advantage node: rewards, and values where there is a critic, become what the learner is told of each decision."""

from collections.abc import Sequence

import numpy as np

from vla_rl.algorithms import AdvantageConfig, AdvantageEstimator, Advantages, RewardBatch, advantage_estimator
from vla_rl.engines.critic import Judged, is_cut_off
from vla_rl.graph import NodeOutput
from vla_rl.recipes.nodes.rewards import Reward, by_decision, by_group, outcome
from vla_rl.types import Group, Trajectory


def members_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories, group by group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


class GroupAdvantage:
    """The node function without a critic: writes `advantages`, of each trajectory float32 [decisions]."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._estimate: AdvantageEstimator = advantage_estimator(config)

    async def __call__(self, groups: Sequence[Group], rewards: Sequence[Sequence[Reward]] | np.ndarray) -> NodeOutput:
        """Advantages of all trajectories, group by group."""
        by_groups = by_group(groups, rewards)
        made = self._estimate(reward_batch(groups, by_groups))
        informative = [np.ptp([outcome(reward) for reward in of_group]) > 0.0 for of_group in by_groups]
        metrics = {"advantage/groups_that_teach": float(np.mean(informative)), **_spread(made)}
        return NodeOutput(made.per_trajectory(), metrics=metrics)


class CriticAdvantage:
    """The node function with a critic: writes `advantages` and `returns`, of each trajectory float32 [decisions]."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._estimate: AdvantageEstimator = advantage_estimator(config)

    async def __call__(
        self,
        groups: Sequence[Group],
        rewards: Sequence[Sequence[Reward]] | np.ndarray,
        judged: Sequence[Sequence[Judged]],
    ) -> NodeOutput:
        """Advantages and returns of all trajectories, group by group."""
        flat = [each for of_group in judged for each in of_group]
        made = self._estimate(reward_batch(groups, by_group(groups, rewards), flat))
        return NodeOutput(
            values={"advantages": made.per_trajectory(), "returns": made.returns_per_trajectory()},
            metrics=_spread(made),
        )


def reward_batch(
    groups: Sequence[Group], rewards: Sequence[Sequence[Reward]], judged: Sequence[Judged] | None = None
) -> RewardBatch:
    """What every estimator is given: one row a trajectory, one column a decision.

    A time limit cuts an episode off (`judged` says what was still to come); success and failure end it.
    """
    trajectories = members_of(groups)
    flat = [reward for of_group in rewards for reward in of_group]
    lengths = [len(trajectory.steps) for trajectory in trajectories]
    mask = np.arange(max(lengths))[None] < np.array(lengths)[:, None]
    by_step = [by_decision(trajectory, reward) for trajectory, reward in zip(trajectories, flat, strict=True)]
    durations = [np.array([step.num_executed for step in trajectory.steps]) for trajectory in trajectories]
    return RewardBatch(
        rewards=np.array([outcome(reward) for reward in flat]),
        group=np.repeat(np.arange(len(groups)), [len(group.trajectories) for group in groups]),
        episode_ids=np.array([trajectory.episode.episode_id for trajectory in trajectories]),
        mask=mask,
        step_rewards=_padded(by_step, mask, np.float64),
        values=None if judged is None else _padded([each.values for each in judged], mask, np.float64),
        final_values=None if judged is None else np.array([each.bootstrap for each in judged]),
        is_terminated=np.array([not is_cut_off(trajectory) for trajectory in trajectories]),
        durations=_padded(durations, mask, np.int64),
        num_tokens=np.array([float(num_tokens(trajectory)) for trajectory in trajectories]),
    )


def num_tokens(trajectory: Trajectory) -> int:
    """Tokens that the policy chose and that had an effect."""
    return sum(len(step.chunk.tokens) // len(step.chunk.actions) * step.num_executed for step in trajectory.steps)


def _padded(rows: Sequence[np.ndarray], mask: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    padded = np.zeros(mask.shape, dtype)
    padded[mask] = np.concatenate(list(rows))
    return padded


def _spread(made: Advantages) -> dict[str, float]:
    values = made.advantage if made.mask is None else made.advantage[made.mask]
    return {"advantage/std": float(values.std()), "advantage/max": float(np.abs(values).max())}
