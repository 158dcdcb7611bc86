"""Nodes that turn rewards into an advantage for each decision: penalties first, then the estimator.

Without a critic, each agent is compared with itself: its return in an episode with its returns in
the other episodes of the group. With one, and for `hierarchical_rloo`, the decisions of all agents
form one sequence, in the order in which they were made.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vla_rl.algorithms import AdvantageConfig, AdvantageEstimator, RewardBatch, advantage_estimator
from vla_rl.algorithms.advantages.reward_batch import make_reward_batch
from vla_rl.algorithms.filters import OverlongConfig, overlong_penalty
from vla_rl.algorithms.kl import KlRewardConfig, mean_kl, next_kl_coef, penalised_rewards
from vla_rl.graph import NodeOutput
from vla_rl.pipelines.nodes.rewards import (
    WrittenRewards,
    outcome,
    outcomes_by_agent,
    rewards_by_group,
)
from vla_rl.types import AgentPart, DecisionRewards, Group, Trajectory, list_agents, split_by_agent

if TYPE_CHECKING:
    from vla_rl.learner import TrajectoryValues


class OverlongPenalty:
    """The node function that subtracts a penalty for an episode's length in tokens."""

    def __init__(self, config: OverlongConfig) -> None:
        self._config = config

    async def __call__(self, groups: Sequence[Group], rewards: WrittenRewards) -> NodeOutput:
        """Return rewards by group, float32 [decisions] for each episode.

        The last decision gets the penalty.
        """
        shaped, penalties = [], []
        for group, of_group in zip(groups, rewards_by_group(groups, rewards), strict=True):
            lengths = np.array(
                [trajectory.num_executed_tokens for trajectory in group.trajectories]
            )
            penalty = overlong_penalty(lengths, self._config)
            # copies, because rewards of another host are read-only views into its message
            rows = [row.copy() for row in of_group]
            for row, lost in zip(rows, penalty.tolist(), strict=True):
                row[-1] += lost
            shaped.append(rows)
            penalties.append(penalty)
        return NodeOutput(
            shaped, metrics={"reward/overlong_mean": float(np.concatenate(penalties).mean())}
        )


class KlCoefficient(msgspec.Struct, frozen=True):
    """Weight of the distance in the reward, per nat.

    Example:
        KlCoefficient(update=7, coef=0.01, next_coef=0.0105, earlier=(0.01,))
    """

    update: int
    """Last update that used it; -1 before the first."""

    coef: float
    """Coefficient in that update."""

    next_coef: float

    earlier: tuple[float, ...] = ()
    """Coefficients in the updates before it that may be made again, the newest last."""


class KlPenalty:
    """The node function that subtracts a penalty for the distance from the reference policy.

    Its only state is the coefficient, which may adapt from update to update. An update that is made
    again, such as after a resume, uses the same coefficient again.

    Args:
        config: coefficient, and how it adapts.
        max_staleness: the run's. Up to this many updates may be rewarded ahead of a checkpoint; a
            resume makes them again.
    """

    def __init__(self, config: KlRewardConfig, max_staleness: int) -> None:
        self._config, self._max_staleness = config, max_staleness
        self._state = KlCoefficient(update=-1, coef=config.coef, next_coef=config.coef)

    async def __call__(
        self,
        update: int,
        groups: Sequence[Group],
        rewards: WrittenRewards,
        reference_log_probs: Sequence[Sequence[Sequence[np.ndarray]]],
    ) -> NodeOutput:
        """Return rewards by group, float32 [decisions] for each episode.

        Each decision gets the penalty of its own tokens.
        """
        earlier, coef = self._stored_coefs(update)
        shaped, sums, counts = [], [], []
        for group, of_group, references in zip(
            groups, rewards_by_group(groups, rewards), reference_log_probs, strict=True
        ):
            rows = []
            for trajectory, reward, reference in zip(
                group.trajectories, of_group, references, strict=True
            ):
                kl = decision_kl(trajectory, reference)
                everywhere = np.ones((1, len(kl)), bool)
                row, _ = penalised_rewards(reward[None], kl[None], everywhere, coef)
                rows.append(row[0].astype(np.float32))
                sums.append(float(kl.sum()))
                counts.append(trajectory.num_executed_tokens)
            shaped.append(rows)
        observed = mean_kl(np.array(sums), np.array(counts), self._config.average)
        next_coef = next_kl_coef(self._config, coef, observed, len(sums))
        self._state = KlCoefficient(update=update, coef=coef, next_coef=next_coef, earlier=earlier)
        return NodeOutput(shaped, metrics={"reward/reference_kl": observed, "reward/kl_coef": coef})

    def _stored_coefs(self, update: int) -> tuple[tuple[float, ...], float]:
        """Return the stored coefficients of the updates before `update`, and its own."""
        state = self._state
        known = (*state.earlier, state.coef, state.next_coef)
        # an update that is made again finds its own coefficient, as if it had never been made
        index = min(max(len(state.earlier) + update - state.update, 0), len(known) - 1)
        return known[max(index - self._max_staleness, 0) : index], known[index]

    def state(self) -> KlCoefficient:
        """Return the coefficients for a checkpoint."""
        return self._state

    def restore(self, state: KlCoefficient) -> None:
        """Continue with the coefficients of a checkpoint."""
        self._state = state


def decision_kl(trajectory: Trajectory, reference: Sequence[np.ndarray]) -> np.ndarray:
    """Sum log pi_behavior - log pi_reference over the executed tokens of each decision.

    This is the estimate k1 of the KL.

    Args:
        trajectory: episode with the log-probs of the weights that acted.
        reference: the reference policy's log-probs, float32 [T] for each decision.

    Returns: float64 [decisions]. Raises: ValueError, naming the episode, if a value is not finite.
    """
    differences = [
        np.where(step.executed_tokens, step.chunk.log_probs.astype(np.float64) - row, 0.0).sum()
        for step, row in zip(trajectory.steps, reference, strict=True)
    ]
    kl = np.array(differences)
    # one value that is not finite would make the mean, and so the next coefficient, not finite for
    # ever
    bad = np.flatnonzero(~np.isfinite(kl))
    if len(bad):
        raise ValueError(
            f"the distance of decision {bad[0]} of episode {trajectory.episode.episode_id} from "
            f"the reference policy is {kl[bad[0]]}, expected a finite number; check the log-probs "
            "of the reference and of the engine."
        )
    return kl


def all_trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Return all trajectories, group by group."""
    return [trajectory for group in groups for trajectory in group.trajectories]


class GroupAdvantage:
    """The node function without a critic.

    Writes `advantages`, float32 [decisions] for each trajectory.
    """

    def __init__(self, config: AdvantageConfig) -> None:
        self._estimate: AdvantageEstimator = advantage_estimator(config)
        self._compares_turns = config.compares_turns

    async def __call__(self, groups: Sequence[Group], rewards: WrittenRewards) -> NodeOutput:
        """Return the advantages of all trajectories, group by group.

        An agent's use its own decisions and returns.
        """
        trajectories = all_trajectories(groups)
        flat = [reward for of_group in rewards_by_group(groups, rewards) for reward in of_group]
        if self._compares_turns:
            return _compare_turns(self._estimate, trajectories, flat)
        advantages = [np.zeros(len(trajectory.steps), np.float32) for trajectory in trajectories]
        informative: list[bool] = []
        for agent in list_agents(trajectories):
            parts = split_by_agent(trajectories, agent)
            batch = _agent_batch(agent, parts, trajectories, flat)
            made = self._estimate(batch).per_trajectory()
            for part, advantage in zip(parts, made, strict=True):
                advantages[part.row][list(part.decisions)] = advantage
            # counted by agent: of two agents one may learn from a group in which the other earned
            # the same
            informative += [
                bool(np.ptp(batch.rewards[rows]) > 0.0)
                for rows in batch.groups("the advantage node")
            ]
        metrics = {
            "advantage/groups_with_signal": float(np.mean(informative)),
            **_spread(np.concatenate(advantages)),
        }
        return NodeOutput(advantages, metrics=metrics)


def _compare_turns(
    estimate: AdvantageEstimator,
    trajectories: Sequence[Trajectory],
    rewards: Sequence[DecisionRewards],
) -> NodeOutput:
    """Return the advantages of an estimator that reads the decisions of all agents together."""
    batch = make_reward_batch(trajectories, step_rewards=rewards)
    made = estimate(batch)
    informative = [bool(made.advantage[rows].any()) for rows in batch.groups("the advantage node")]
    assert made.mask is not None, "a batch of trajectories has a mask"
    metrics = {
        "advantage/groups_with_signal": float(np.mean(informative)),
        **_spread(made.advantage[made.mask]),
    }
    return NodeOutput([np.asarray(row) for row in made.per_trajectory()], metrics=metrics)


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
        values: "Sequence[Sequence[TrajectoryValues]]",
    ) -> NodeOutput:
        """Return the advantages and returns of all trajectories, group by group."""
        flat = [each for of_group in values for each in of_group]
        made = self._estimate(reward_batch(groups, rewards_by_group(groups, rewards), flat))
        acted = made.advantage if made.mask is None else made.advantage[made.mask]
        return NodeOutput(
            values={"advantages": made.per_trajectory(), "returns": made.returns_per_trajectory()},
            metrics=_spread(acted),
        )


def reward_batch(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[DecisionRewards]],
    values: "Sequence[TrajectoryValues]",
) -> RewardBatch:
    """Build the input of an estimator with a critic.

    It has one row per trajectory and one column per decision of any agent.

    A time limit truncates an episode (`values` holds the value of the rest); success and failure
    end it.
    """
    trajectories = all_trajectories(groups)
    flat = [row for of_group in rewards for row in of_group]
    return make_reward_batch(
        trajectories,
        # the outcome with the penalties that were subtracted on the way, not the environment's
        np.array([outcome(*pair) for pair in zip(trajectories, flat, strict=True)]),
        step_rewards=flat,
        values=[each.values for each in values],
        final_values=np.array([each.bootstrap for each in values]),
    )


def _agent_batch(
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
    return make_reward_batch(
        alone,
        # an agent is compared by what it earned itself, not by the sum of all agents
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
