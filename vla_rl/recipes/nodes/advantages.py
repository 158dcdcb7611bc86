"""The advantage node: rewards, and values where there is a critic, become what the learner is told of each decision."""

from collections.abc import Sequence

import numpy as np

from vla_rl.algorithms import AdvantageConfig, AdvantageEstimator, Advantages, RewardBatch, advantage_estimator
from vla_rl.algorithms.advantages.from_trajectories import reward_batch_of
from vla_rl.engines.critic import Judged
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

    A time limit cuts an episode off (`judged` says what was still to come); success and failure end it. Where a member of a
    group played greedily, its outcome is what ReMax compares the others with.
    """
    trajectories = members_of(groups)
    flat = [reward for of_group in rewards for reward in of_group]
    outcomes = np.array([outcome(reward) for reward in flat])
    return reward_batch_of(
        trajectories,
        outcomes,
        step_rewards=[by_decision(*pair) for pair in zip(trajectories, flat, strict=True)],
        values=None if judged is None else [each.values for each in judged],
        final_values=None if judged is None else np.array([each.bootstrap for each in judged]),
        greedy_rewards=_greedy_outcomes(trajectories, outcomes),
    )


def _greedy_outcomes(trajectories: Sequence[Trajectory], outcomes: np.ndarray) -> np.ndarray | None:
    """float [N], of the greedy member of each one's group; None unless every group has one."""
    pairs = zip(trajectories, outcomes.tolist(), strict=True)
    greedy = {each.episode.group_id: earned for each, earned in pairs if each.episode.sampling.greedy}
    groups = [each.episode.group_id for each in trajectories]
    return np.array([greedy[group] for group in groups]) if greedy.keys() >= set(groups) else None


def _spread(made: Advantages) -> dict[str, float]:
    values = made.advantage if made.mask is None else made.advantage[made.mask]
    return {"advantage/std": float(values.std()), "advantage/max": float(np.abs(values).max())}
