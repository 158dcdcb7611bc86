"""Nodes that run other networks on episodes: the critic and the reference policy."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vla_rl.actors.completion import finish_despite_cancellation
from vla_rl.graph import NodeOutput
from vla_rl.pipelines.nodes.advantages import members_of
from vla_rl.types import Group

if TYPE_CHECKING:  # they import torch, which reading a pipeline's settings does not need
    from vla_rl.learner import CriticTeam, Judged, ReferenceTeam


class JudgeValues:
    """The node function that computes the values of one group's episodes, one `Judged` for each."""

    def __init__(self, critic: "CriticTeam") -> None:
        self._critic = critic

    async def __call__(self, group: Group) -> "list[Judged]":
        """Return the value of every decision, and of the observation after the last one."""
        return await self._critic.values(group.trajectories)


class LearnValues:
    """The node function that fits the critic to the returns of an update.

    Once started, it is completed.
    """

    def __init__(self, critic: "CriticTeam") -> None:
        self._critic = critic

    async def __call__(
        self,
        update: int,
        groups: Sequence[Group],
        judged: "Sequence[Sequence[Judged]]",
        returns: Sequence[np.ndarray],
    ) -> NodeOutput:
        """Fit the values and write metrics.

        There are none if the critic learnt from this update before a resume.
        """
        flat = [each for of_group in judged for each in of_group]
        learning = self._critic.update(members_of(groups), flat, returns, number=update)
        metrics, is_cancelled = await finish_despite_cancellation(learning)
        if is_cancelled:
            raise asyncio.CancelledError
        return NodeOutput(values={}, metrics=metrics)


class ReferenceLogProbs:
    """The node function that computes log-probs under the frozen reference policy."""

    def __init__(self, reference: "ReferenceTeam") -> None:
        self._reference = reference

    async def __call__(self, group: Group) -> list[list[np.ndarray]]:
        """Return, for each episode, float32 [T] for each decision."""
        return await self._reference.log_probs(group.trajectories)
