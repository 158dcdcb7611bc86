"""The groups that were dispatched and have not left yet.

They have episodes still to run, and members that were run.
"""

import heapq

import msgspec

from vla_rl.rollout.groups import GroupPlan
from vla_rl.types import EpisodeSpec, Group, Trajectory


class GroupState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one outstanding group: its plan and the members that were run."""

    plan: GroupPlan
    dispatch_version: int
    trajectories: tuple[Trajectory, ...]
    """Members run so far, in order of `member`."""

    @property
    def is_complete(self) -> bool:
        """Whether every member was run; the missing ones are run after a resume."""
        return len(self.trajectories) == len(self.plan.episodes)


def has_deposits(group: Group) -> bool:
    """Return whether arrays of a group are on other hosts."""
    return any(member.deposit is not None for member in group.trajectories)


class _Record:
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
        self._records: dict[int, _Record] = {}
        self._to_begin: list[tuple[int, EpisodeSpec]] = []

    def add(self, plan: GroupPlan, dispatch_version: int) -> None:
        """Add a dispatched group, with all its episodes to start."""
        self._records[plan.group_id] = _Record(plan, dispatch_version)
        for episode in plan.episodes:
            self.begin_again(episode)

    def add_played(self, group: GroupState) -> Group | None:
        """Add a saved group, whose finished members are not run again.

        Return the group if it is complete.
        """
        record = self._records[group.plan.group_id] = _Record(group.plan, group.dispatch_version)
        record.finished = {
            trajectory.episode.member: trajectory for trajectory in group.trajectories
        }
        for episode in group.plan.episodes:
            if episode.member not in record.finished:
                self.begin_again(episode)
        return self._group(record) if group.is_complete else None

    def begin_again(self, episode: EpisodeSpec) -> None:
        """Queue an episode to start, for the first time or again."""
        heapq.heappush(self._to_begin, (episode.episode_id, episode))

    def lose(self, episode: EpisodeSpec) -> None:
        """Queue a member again that was run, and whose arrays were lost since."""
        del self._records[episode.group_id].finished[episode.member]
        self.begin_again(episode)

    def next_episode(self) -> EpisodeSpec | None:
        """Return the episode to start now: the first member of the oldest group."""
        return heapq.heappop(self._to_begin)[1] if self._to_begin else None

    def finish(self, trajectory: Trajectory) -> Group | None:
        """Store a member that was run. Return its group if it was the last one."""
        episode = trajectory.episode
        record = self._records[episode.group_id]
        record.finished[episode.member] = trajectory
        return self._group(record) if len(record.finished) == len(record.plan.episodes) else None

    def remove(self, group_id: int) -> GroupPlan:
        """Remove a group that was trained, filtered or dropped, with its unstarted episodes."""
        record = self._records.pop(group_id)
        if len(record.finished) < len(record.plan.episodes):
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

    def num_played(self) -> tuple[int, int]:
        """Return how many episodes were run, in complete groups and in those that miss a member."""
        complete = partial = 0
        for record in self._records.values():
            if len(record.finished) == len(record.plan.episodes):
                complete += len(record.finished)
            else:
                partial += len(record.finished)
        return complete, partial

    def light(self) -> tuple[Trajectory, ...]:
        """Return the members that were run and whose arrays are on other hosts."""
        return tuple(
            member
            for record in self._records.values()
            for member in record.in_order()
            if member.deposit is not None
        )

    def complete_and_light(self) -> tuple[Group, ...]:
        """Return the groups whose members were all run, some with arrays on other hosts."""
        groups = [
            self._group(record)
            for record in self._records.values()
            if len(record.finished) == len(record.plan.episodes)
        ]
        return tuple(group for group in groups if has_deposits(group))

    def state(self) -> tuple[GroupState, ...]:
        """Return all outstanding groups, in order of dispatch.

        Members whose pictures are on a shelf are left out, and run again after a resume: a shelf ends
        with its run.
        """
        return tuple(
            GroupState(
                plan=record.plan,
                dispatch_version=record.dispatch_version,
                trajectories=tuple(each for each in record.in_order() if each.shelved is None),
            )
            for record in self._records.values()
        )

    def _group(self, record: _Record) -> Group:
        return Group(
            group_id=record.plan.group_id,
            trajectories=record.in_order(),
            dispatch_version=record.dispatch_version,
        )
