"""The advantage node: an advantage for each decision, from rewards and a critic's values.

Without a critic, each agent is compared with itself: its return in an episode with its returns in
the other episodes of the group. With one, the decisions of all agents form one sequence, in the
order in which they were made.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.algorithms import AdvantageConfig, AdvantageEstimator, RewardBatch, advantage_estimator
from vla_rl.algorithms.advantages.from_trajectories import reward_batch_of
from vla_rl.graph import NodeOutput
from vla_rl.pipelines.nodes.rewards import (
    WrittenRewards,
    outcome,
    outcomes_by_agent,
    rewards_by_group,
)
from vla_rl.types import AgentPart, DecisionRewards, Group, Trajectory, agents_of, parts_of

if TYPE_CHECKING:  # imports torch, which reading a pipeline's settings does not need
    from vla_rl.learner import Judged


def members_of(groups: Sequence[Group]) -> list[Trajectory]:
    """Return all trajectories, group by group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


class GroupAdvantage:
    """The node function without a critic.

    Writes `advantages`, float32 [decisions] for each trajectory.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self._estimate: AdvantageEstimator = advantage_estimator(config)

    async def __call__(self, groups: Sequence[Group], rewards: WrittenRewards) -> NodeOutput:
        """Return the advantages of all trajectories, group by group.

        An agent's use its own decisions and returns.
        """
        trajectories = members_of(groups)
        flat = [reward for of_group in rewards_by_group(groups, rewards) for reward in of_group]
        advantages = [np.zeros(len(trajectory.steps), np.float32) for trajectory in trajectories]
        informative: list[bool] = []
        for agent in agents_of(trajectories):
            parts = parts_of(trajectories, agent)
            batch = _batch_of_agent(agent, parts, trajectories, flat)
            made = self._estimate(batch).per_trajectory()
            for part, advantage in zip(parts, made, strict=True):
                advantages[part.row][list(part.decisions)] = advantage
            informative += [
                bool(np.ptp(batch.rewards[rows]) > 0.0)
                for rows in batch.groups("the advantage node")
            ]
        metrics = {
            "advantage/groups_that_teach": float(np.mean(informative)),
            **_spread(np.concatenate(advantages)),
        }
        return NodeOutput(advantages, metrics=metrics)


class CriticAdvantage:
    """The node function with a critic.

    Writes `advantages` and `returns`, float32 [decisions] for each trajectory.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self._estimate: AdvantageEstimator = advantage_estimator(config)

    async def __call__(
        self,
        groups: Sequence[Group],
        rewards: WrittenRewards,
        judged: "Sequence[Sequence[Judged]]",
    ) -> NodeOutput:
        """Return the advantages and returns of all trajectories, group by group."""
        flat = [each for of_group in judged for each in of_group]
        made = self._estimate(reward_batch(groups, rewards_by_group(groups, rewards), flat))
        acted = made.advantage if made.mask is None else made.advantage[made.mask]
        return NodeOutput(
            values={"advantages": made.per_trajectory(), "returns": made.returns_per_trajectory()},
            metrics=_spread(acted),
        )


def reward_batch(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[DecisionRewards]],
    judged: "Sequence[Judged]",
) -> RewardBatch:
    """Build the input of an estimator with a critic.

    It has one row per trajectory and one column per decision of any agent.

    A time limit truncates an episode (`judged` holds the value of the rest); success and failure
    end it.
    """
    trajectories = members_of(groups)
    flat = [row for of_group in rewards for row in of_group]
    return reward_batch_of(
        trajectories,
        np.array([outcome(*pair) for pair in zip(trajectories, flat, strict=True)]),
        step_rewards=flat,
        values=[each.values for each in judged],
        final_values=np.array([each.bootstrap for each in judged]),
    )


def _batch_of_agent(
    agent: str,
    parts: Sequence[AgentPart],
    trajectories: Sequence[Trajectory],
    rewards: Sequence[DecisionRewards],
) -> RewardBatch:
    """Build one agent's input of an estimator without a critic.

    It has one row for each episode in which the agent decided.

    If an episode of a group is greedy, the agent's return in it is the baseline of ReMax.
    """
    own = [rewards[part.row][list(part.decisions)] for part in parts]
    greedy = {
        trajectory.episode.group_id: outcomes_by_agent(trajectory, reward).get(agent, 0.0)
        for trajectory, reward in zip(trajectories, rewards, strict=True)
        if trajectory.episode.sampling.greedy
    }
    alone = [part.trajectory for part in parts]
    groups = [each.episode.group_id for each in alone]
    return reward_batch_of(
        alone,
        np.array([float(np.sum(earned)) for earned in own]),
        step_rewards=own,
        greedy_rewards=np.array([greedy[group] for group in groups])
        if greedy.keys() >= set(groups)
        else None,
    )


def _spread(advantage: np.ndarray) -> dict[str, float]:
    return {
        "advantage/std": float(advantage.std()),
        "advantage/max": float(np.abs(advantage).max()),
    }
