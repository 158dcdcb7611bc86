"""Nodes that call a part of the run: scheduler, critic, reference policy, learner, saver, recorder.

From an update's episodes, two kinds are left out after the advantages are computed, and count only in
their groups' baselines:

    greedy       ReMax's baseline episode, in which the policy did not sample its actions
    truncated    by a limit and unsolved, if `filter.mask_truncated` is set: DAPO's overlong filtering
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_rl.algorithms.filters import overlong_filter
from vla_rl.graph import NodeOutput, WrongInput
from vla_rl.pipelines.nodes.advantages import all_trajectories
from vla_rl.rollout import EpisodeScheduler
from vla_rl.types import Group, Trajectory
from vla_rl.util.tasks import finish_despite_cancellation

if TYPE_CHECKING:  # they import torch, which reading a pipeline's settings does not need
    from vla_rl.learner import (
        CriticTeam,
        LearnerTeam,
        ReferenceTeam,
        TrajectoryValues,
        UpdateReport,
    )
    from vla_rl.learner.rows import Advantage


class Collect:
    """The node function that yields the groups of an update as they complete."""

    def __init__(self, scheduler: EpisodeScheduler) -> None:
        self._scheduler = scheduler

    async def __call__(self, update: int) -> AsyncIterator[Group]:
        """Yield each group once it is complete and kept."""
        async for group in self._scheduler.groups_for_update(update):
            yield group


class Learn:
    """The node function that updates the policy and records the update in the scheduler.

    Args:
        learner: updates the policies of the run.
        scheduler: records which episodes were trained on.
        mask_truncated: do not learn from episodes that a limit truncated unsolved.
        warmup_updates: returns the number of first updates in which only the critic learns.
        snapshot: returns the content of a checkpoint.
        is_due: returns whether a checkpoint follows the update of this version.
    """

    def __init__(
        self,
        learner: "LearnerTeam",
        scheduler: EpisodeScheduler,
        *,
        mask_truncated: bool,
        warmup_updates: Callable[[], int],
        snapshot: Callable[[], Awaitable[Any]],
        is_due: Callable[[int], bool],
    ) -> None:
        self._learner, self._scheduler = learner, scheduler
        self._mask_truncated, self._warmup_updates = mask_truncated, warmup_updates
        self._snapshot, self._is_due = snapshot, is_due
        self._is_learning = False
        self.last_report: UpdateReport | None = None
        """Report of the newest update."""

    @property
    def is_between_updates(self) -> bool:
        """Whether weights, optimizer and scheduler are at the same complete update.

        Stays False after a failed one.
        """
        return not self._is_learning and self._learner.weight_version == self._scheduler.version

    async def __call__(
        self,
        groups: Sequence[Group],
        advantages: "Sequence[Advantage] | np.ndarray",
        reference_log_probs: Sequence[Sequence[Sequence[np.ndarray]]] | None = None,
    ) -> NodeOutput:
        """Make one update; write a snapshot to save if a checkpoint is due, else None.

        The policy does not change while its critic warms up, or if no episode is left to learn
        from. An update that has started is completed even if it is cancelled, so that weights and
        scheduler agree about the version.

        Args:
            groups: groups of the update.
            advantages: one for each episode of all groups, in order.
            reference_log_probs: for each episode of each group, float32 [T] for each decision.
        """
        trajectories = all_trajectories(groups)
        if len(advantages) != len(trajectories):
            raise WrongInput(
                "advantages",
                f"there are {len(advantages)}, expected {len(trajectories)}, one for each episode",
            )
        references = None
        if reference_log_probs is not None:
            # flat, in the order of the trajectories, as the learner takes them
            references = [log_probs for of_group in reference_log_probs for log_probs in of_group]
        update = self._update_of(trajectories, list(advantages), references)
        # stays True if the update raises: it may have changed half of the weights
        self._is_learning = True
        report, is_cancelled = await finish_despite_cancellation(update)
        # no await in between: a snapshot taken there would have trained on episodes that its ledger
        # still counts as buffered, and a resume would train on them again
        self._scheduler.mark_trained(groups, report.weight_version)
        self._is_learning, self.last_report = False, report
        if is_cancelled:
            raise asyncio.CancelledError
        snapshot = await self._snapshot() if self._is_due(report.weight_version) else None
        return NodeOutput(values={"snapshot": snapshot}, metrics=report.metrics)

    def _update_of(
        self,
        trajectories: list[Trajectory],
        advantages: "list[Advantage]",
        references: list[Sequence[np.ndarray]] | None,
    ) -> Any:
        """Return the coroutine of the update, not started."""
        kept, advantages = select_episodes(
            trajectories, advantages, mask_truncated=self._mask_truncated
        )
        references = None if references is None else [references[row] for row in kept]
        if not kept or self._scheduler.version < self._warmup_updates():
            return self._learner.publish_unchanged()
        return self._learner.update([trajectories[row] for row in kept], advantages, references)


class Save:
    """The node function that prepares a checkpoint.

    It appears once the update's metrics are written.
    """

    def __init__(self, prepare: Callable[[Any], Awaitable[None]]) -> None:
        self._prepare = prepare

    async def __call__(self, snapshot: Any) -> None:
        """Write `snapshot`, unless it is None."""
        if snapshot is not None:
            await self._prepare(snapshot)


class Show:
    """The node function that offers episodes to the recorder of videos.

    The recorder picks some and returns at once.
    """

    def __init__(self) -> None:
        self.offer: Callable[[int, Sequence[Trajectory]], None] | None = None
        """Recorder, called with the update and its episodes; None if there is none."""

    async def __call__(self, update: int, groups: Sequence[Group]) -> None:
        """Offer all episodes of the update."""
        if self.offer is not None:
            self.offer(update, all_trajectories(groups))


class EstimateValues:
    """The node function that computes the values of one group's episodes, one `TrajectoryValues` for each."""

    def __init__(self, critic: "CriticTeam") -> None:
        self._critic = critic

    async def __call__(self, group: Group) -> "list[TrajectoryValues]":
        """Return the value of every decision, and of the observation after the last one."""
        return await self._critic.values(group.trajectories)


class TrainCritic:
    """The node function that fits the critic to the returns of an update.

    Once started, it is completed.
    """

    def __init__(self, critic: "CriticTeam") -> None:
        self._critic = critic

    async def __call__(
        self,
        update: int,
        groups: Sequence[Group],
        values: "Sequence[Sequence[TrajectoryValues]]",
        returns: Sequence[np.ndarray],
    ) -> NodeOutput:
        """Fit the values and write metrics.

        There are none if the critic learnt from this update before a resume.
        """
        flat = [each for of_group in values for each in of_group]
        # completed even if it is cancelled, for the same reason as the policy's update: weights and
        # optimizer must be of one version when they are saved
        learning = self._critic.fit_values(all_trajectories(groups), flat, returns, number=update)
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


def is_cut_short(trajectory: Trajectory) -> bool:
    """Return whether a limit ended the episode unsolved, so that its full return is unknown."""
    return trajectory.stop_reason.is_cut_off and not trajectory.is_success


def select_episodes(
    trajectories: Sequence[Trajectory], advantages: "Sequence[Advantage]", *, mask_truncated: bool
) -> "tuple[list[int], list[Advantage]]":
    """Return the positions of the episodes to learn from, and their advantages; both may be empty.

    Args:
        trajectories: episodes of the update.
        advantages: one for each episode.
        mask_truncated: leave out episodes that a limit truncated unsolved.
    """
    # a greedy episode is ReMax's baseline: its tokens were not sampled, so they have no gradient of
    # the policy
    is_learnt = np.array([not trajectory.episode.sampling.greedy for trajectory in trajectories])
    if mask_truncated:
        # their return is unknown and not zero, so that learning from them would punish slow
        # successes
        is_short = np.array([is_cut_short(trajectory) for trajectory in trajectories])
        is_learnt = overlong_filter(is_learnt[:, None], is_short)[:, 0]
    kept = np.flatnonzero(is_learnt).tolist()
    return kept, [advantages[row] for row in kept]
