"""Nodes that ask another network about episodes: the critic for values, the reference policy for log-probs."""

import asyncio
from collections.abc import Sequence

import numpy as np

from vla_rl.actors.completion import carried_through
from vla_rl.graph import NodeOutput
from vla_rl.learning import Critic, CriticTeam, Judged, Reference, ReferenceTeam
from vla_rl.nodes.advantages import members_of
from vla_rl.types import Group


class JudgeValues:
    """The node function: values of one group's episodes, one `Judged` for each."""

    def __init__(self, critic: Critic | CriticTeam) -> None:
        self._critic = critic

    async def __call__(self, group: Group) -> list[Judged]:
        """Values of every decision, and of what came after the last one."""
        return await self._critic.values(group.trajectories)


class LearnValues:
    """The node function: the critic learns from the returns of an update, once begun to the end."""

    def __init__(self, critic: Critic | CriticTeam) -> None:
        self._critic = critic

    async def __call__(
        self, update: int, groups: Sequence[Group], judged: Sequence[Sequence[Judged]], returns: Sequence[np.ndarray]
    ) -> NodeOutput:
        """Fit the values; writes nothing but metrics, and none where it learnt from this update before a resume."""
        flat = [each for of_group in judged for each in of_group]
        learning = self._critic.update(members_of(groups), flat, returns, number=update)
        metrics, is_cancelled = await carried_through(learning)
        if is_cancelled:
            raise asyncio.CancelledError
        return NodeOutput(values={}, metrics=metrics)


class ReferenceLogProbs:
    """The node function: how likely the frozen reference policy would have made one group's choices."""

    def __init__(self, reference: Reference | ReferenceTeam) -> None:
        self._reference = reference

    async def __call__(self, group: Group) -> list[list[np.ndarray]]:
        """For each episode float32 [T] of each decision."""
        return await self._reference.log_probs(group.trajectories)
