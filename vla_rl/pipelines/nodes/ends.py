"""The nodes at the ends of a pipeline: collect groups; learn from them, save and show."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from vla_rl.actors.completion import finish_despite_cancellation
from vla_rl.graph import NodeOutput, WrongInput
from vla_rl.learner import LearnerTeam, UpdateReport
from vla_rl.learner.rows import Advantage
from vla_rl.pipelines.nodes.advantages import members_of
from vla_rl.pipelines.nodes.selection import select_episodes
from vla_rl.rollout import EpisodeScheduler
from vla_rl.types import Group, Trajectory


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
        learner: LearnerTeam,
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
        advantages: Sequence[Advantage] | np.ndarray,
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
        trajectories = members_of(groups)
        if len(advantages) != len(trajectories):
            raise WrongInput(
                "advantages",
                f"there are {len(advantages)}, expected {len(trajectories)}, one for each episode",
            )
        references = None
        if reference_log_probs is not None:
            references = [log_probs for of_group in reference_log_probs for log_probs in of_group]
        update = self._update_of(trajectories, list(advantages), references)
        # stays True if the update raises: it may have changed half of the weights
        self._is_learning = True
        report, is_cancelled = await finish_despite_cancellation(update)
        # no await in between: a snapshot taken there would have trained on episodes that its ledger
        # still counts as buffered, and a resume would train on them again
        self._scheduler.trained(groups, report.weight_version)
        self._is_learning, self.last_report = False, report
        if is_cancelled:
            raise asyncio.CancelledError
        snapshot = await self._snapshot() if self._is_due(report.weight_version) else None
        return NodeOutput(values={"snapshot": snapshot}, metrics=report.metrics)

    def _update_of(
        self,
        trajectories: list[Trajectory],
        advantages: list[Advantage],
        references: list[Sequence[np.ndarray]] | None,
    ) -> Any:
        """Return the coroutine of the update, not started."""
        kept, advantages = select_episodes(
            trajectories, advantages, mask_truncated=self._mask_truncated
        )
        references = None if references is None else [references[row] for row in kept]
        if not kept or self._scheduler.version < self._warmup_updates():
            return self._learner.stand_still()
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
            self.offer(update, members_of(groups))
