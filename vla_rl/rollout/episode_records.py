"""The records of a run's episodes: where each one is that was dispatched and has not left yet.

    source ─► admitted ─► to begin ─► running ─► in its group ─► buffered ─► handed to an update ─► trained
                              ▲           │                 └► filtered            └► dropped: too old after a resume
                              └── lost ◄──┘

No task and no clock: `EpisodeScheduler` runs the episodes, and writes here what became of them.
"""

import heapq
from collections.abc import Iterator, Sequence

import msgspec

from vla_rl.rollout.counts import EpisodeLedger, LedgerState
from vla_rl.rollout.groups import GroupPlan, GroupSource, SourceState
from vla_rl.rollout.staleness import Handover, SchedulerConfig, StalenessPolicy
from vla_rl.types import EpisodeSpec, Group, Trajectory


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one outstanding group: its plan and the members that were run.

    Example:
        A group of four, two members of which have run; the others run after a resume:

        GroupState(plan=GroupPlan(group_id=12, ...), dispatch_version=3, trajectories=(first, third))
    """

    plan: GroupPlan
    dispatch_version: int
    trajectories: tuple[Trajectory, ...]
    """Members run so far, in order of `member`."""

    @property
    def is_complete(self) -> bool:
        """Whether every member was run; the missing ones are run after a resume."""
        return len(self.trajectories) == len(self.plan.episodes)


def has_references(group: Group) -> bool:
    """Return whether arrays of a group are on other hosts."""
    return any(member.episode_ref is not None for member in group.trajectories)


class _OutstandingGroup:
    """One group while it is outstanding."""

    __slots__ = ("dispatch_version", "finished", "plan")

    def __init__(self, plan: GroupPlan, dispatch_version: int) -> None:
        self.plan, self.dispatch_version = plan, dispatch_version
        self.finished: dict[int, Trajectory] = {}

    def in_order(self) -> tuple[Trajectory, ...]:
        return tuple(self.finished[member] for member in sorted(self.finished))


class OutstandingGroups:
    """Episodes to start, oldest group first, and the members of each group that were run."""

    def __init__(self) -> None:
        self._records: dict[int, _OutstandingGroup] = {}
        self._to_begin: list[tuple[int, EpisodeSpec]] = []

    def add_group(self, plan: GroupPlan, dispatch_version: int) -> None:
        """Add a dispatched group, with all its episodes to start."""
        self._records[plan.group_id] = _OutstandingGroup(plan, dispatch_version)
        for episode in plan.episodes:
            self.queue_episode(episode)

    def add_saved(self, group: GroupState) -> Group | None:
        """Add a saved group, whose finished members are not run again.

        Return the group if it is complete.
        """
        record = self._records[group.plan.group_id] = _OutstandingGroup(
            group.plan, group.dispatch_version
        )
        record.finished = {
            trajectory.episode.member: trajectory for trajectory in group.trajectories
        }
        for episode in group.plan.episodes:
            if episode.member not in record.finished:
                self.queue_episode(episode)
        return self._group(record) if group.is_complete else None

    def queue_episode(self, episode: EpisodeSpec) -> None:
        """Queue an episode to start, for the first time or again."""
        # A heap by id, because a lost episode comes back: it must begin before all newer ones, or
        # its group, and with it the update, would wait for a whole episode more.
        heapq.heappush(self._to_begin, (episode.episode_id, episode))

    def queue_lost(self, episode: EpisodeSpec) -> None:
        """Queue a member again that was run, and whose arrays were lost since."""
        del self._records[episode.group_id].finished[episode.member]
        self.queue_episode(episode)

    def next_episode(self) -> EpisodeSpec | None:
        """Return the episode to start now: the first member of the oldest group."""
        return heapq.heappop(self._to_begin)[1] if self._to_begin else None

    def finish(self, trajectory: Trajectory) -> Group | None:
        """Store a member that was run. Return its group if it was the last one."""
        episode = trajectory.episode
        record = self._records[episode.group_id]
        record.finished[episode.member] = trajectory
        return self._group(record) if len(record.finished) == len(record.plan.episodes) else None

    def remove_group(self, group_id: int) -> GroupPlan:
        """Remove a group that was trained, filtered or dropped, with its unstarted episodes."""
        record = self._records.pop(group_id)
        if len(record.finished) < len(record.plan.episodes):
            # Searched only for a group that a resume drops; complete ones have nothing to start.
            self._to_begin = [entry for entry in self._to_begin if entry[1].group_id != group_id]
            heapq.heapify(self._to_begin)
        return record.plan

    def missing(self, group_id: int) -> list[int]:
        """Return the ids of a group's episodes that were not run yet."""
        record = self._records[group_id]
        return [
            episode.episode_id
            for episode in record.plan.episodes
            if episode.member not in record.finished
        ]

    @property
    def num_to_begin(self) -> int:
        """Episodes that wait for an environment."""
        return len(self._to_begin)

    def count_finished(self) -> tuple[int, int]:
        """Return how many episodes were run, in complete groups and in those that miss a member."""
        complete = partial = 0
        for record in self._records.values():
            if len(record.finished) == len(record.plan.episodes):
                complete += len(record.finished)
            else:
                partial += len(record.finished)
        return complete, partial

    def stored_members(self) -> tuple[Trajectory, ...]:
        """Return the members that were run and whose arrays are on other hosts."""
        return tuple(
            member
            for record in self._records.values()
            for member in record.in_order()
            if member.episode_ref is not None
        )

    def complete_with_references(self) -> tuple[Group, ...]:
        """Return the groups whose members were all run, some with arrays on other hosts."""
        groups = [
            self._group(record)
            for record in self._records.values()
            if len(record.finished) == len(record.plan.episodes)
        ]
        return tuple(group for group in groups if has_references(group))

    def state(self) -> tuple[GroupState, ...]:
        """Return all outstanding groups, in order of dispatch.

        Members whose images are in an image cache are left out, and run again after a resume: an image cache ends
        with its run.
        """
        return tuple(
            GroupState(
                plan=record.plan,
                dispatch_version=record.dispatch_version,
                trajectories=tuple(
                    each for each in record.in_order() if each.cached_images is None
                ),
            )
            for record in self._records.values()
        )

    def _group(self, record: _OutstandingGroup) -> Group:
        return Group(
            group_id=record.plan.group_id,
            trajectories=record.in_order(),
            dispatch_version=record.dispatch_version,
        )


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a scheduler needs to continue, taken at one instant.

    A resume loses no start and repeats none.

    Example:
        SchedulerState(version=3, source=SourceState(num_starts=500, epoch=0, position=13, next_group_id=13),
                       ledger=LedgerState(dispatched=104, trained=96), groups=(GroupState(...),))
    """

    version: int
    source: SourceState
    ledger: LedgerState
    groups: tuple[GroupState, ...]
    """Outstanding groups: complete ones are buffered (or were in training), others continue with
    the missing members."""


class EpisodeRecords:
    """Admits groups, and knows the place of each of their episodes.

    Args:
        source: the groups to run.
        config: sizes and staleness.
        num_updates: updates of the whole run; None: no end.

    Attributes:
        groups: groups that have not left, with their episodes to start and the members that ran.
        handover: complete groups, and the update that each is handed to.
        staleness: decides what is admitted and which group is trained next.
    """

    def __init__(
        self, source: GroupSource, config: SchedulerConfig, num_updates: int | None
    ) -> None:
        self._source, self._config, self._num_updates = source, config, num_updates
        self._begin_at(0, EpisodeLedger())

    @property
    def version(self) -> int:
        """Updates trained so far."""
        return self.staleness.version

    @property
    def dropped(self) -> dict[str, int]:
        """Number of episodes that were dropped, by cause."""
        return self._ledger.dropped

    def next_episode(self, served_version: int) -> EpisodeSpec | None:
        """Return the episode to start in an idle slot; None if staleness allows no more.

        A group is admitted for an idle slot only: one admitted earlier would be older when it is
        trained, and count against `max_staleness` while it waits.

        Args:
            served_version: weight version that every engine serves, or a newer one.
        """
        # An engine may have weights that the learner has published and the scheduler has not
        # counted yet.
        dispatched_at = min(served_version, self.version)
        while (episode := self.groups.next_episode()) is None:
            if not self.staleness.can_admit(dispatched_at):
                return None
            plan = self._source.next_group()
            self.staleness.admit(plan.group_id, dispatched_at)
            self.groups.add_group(plan, dispatched_at)
            # All members at once: a group is whole or not there, so no count is ever of half a
            # group.
            self._ledger.count_dispatched(len(plan.episodes))
        return episode

    def queue_again(self, episode: EpisodeSpec) -> None:
        """Queue the next attempt at an episode that was lost, before any newer episode."""
        self.groups.queue_episode(_next_attempt(episode))

    def queue_lost(self, member: EpisodeSpec) -> None:
        """Queue the next attempt at a member that ran, and whose arrays are lost."""
        self.groups.queue_lost(_next_attempt(member))

    def remove_filtered(self, group: Group) -> None:
        """Remove a complete group that is not kept; another is admitted instead of it."""
        self.groups.remove_group(group.group_id)
        self._ledger.count_filtered(len(group.trajectories))
        self.staleness.remove_filtered(group.group_id)

    def take_trained(self) -> Iterator[Group]:
        """Remove the groups of the oldest update, which was trained on them; yield them."""
        for group in self.handover.take_trained():
            self._ledger.count_trained(len(group.trajectories))
            self.groups.remove_group(group.group_id)
            yield group

    def check_conservation(self, num_running: int) -> None:
        """Compare the ledger with the episodes held.

        Raises: ConservationError, with the table, if they differ.
        """
        complete, partial = self.groups.count_finished()
        in_flight = self.groups.num_to_begin + num_running + partial
        self._ledger.check_conservation(in_flight=in_flight, buffered=complete)

    def state(self) -> SchedulerState:
        """Return the whole book; running episodes are among those to start after a resume."""
        return SchedulerState(
            version=self.version,
            source=self._source.state(),
            ledger=self._ledger.state(),
            groups=self.groups.state(),
        )

    def restore(self, state: SchedulerState) -> None:
        """Continue where `state` was taken. Groups that are too old to be trained are dropped.

        Raises: ConfigError if `state` does not fit the source.
        """
        self._source.restore(state.source)
        self._begin_at(state.version, EpisodeLedger(state.ledger))
        self._add_saved(state.groups)
        # only after all groups are back: which are too old depends on how many are before them
        for group_id in self.handover.evict():
            plan = self.groups.remove_group(group_id)
            self._ledger.count_dropped(len(plan.episodes), "stale")
            # Its start would otherwise be missing from the epoch: after N epochs each start was
            # handed out N times.
            self._source.return_start(plan)

    def _begin_at(self, version: int, ledger: EpisodeLedger) -> None:
        self.staleness = StalenessPolicy(
            max_staleness=self._config.max_staleness,
            groups_per_update=self._config.groups_per_update,
            in_order=self._config.deterministic,
            max_outstanding=self._config.max_outstanding_groups,
            num_updates=self._num_updates,
            version=version,
        )
        self.handover = Handover(self.staleness)
        self.groups, self._ledger = OutstandingGroups(), ledger

    def _add_saved(self, groups: Sequence[GroupState]) -> None:
        for saved in groups:
            self.staleness.admit(saved.plan.group_id, saved.dispatch_version)
            group = self.groups.add_saved(saved)
            if group is not None and not has_references(group):
                self.handover.add_group(group)


def _next_attempt(episode: EpisodeSpec) -> EpisodeSpec:
    return msgspec.structs.replace(episode, attempt=episode.attempt + 1)
