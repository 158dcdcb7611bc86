"""How far generation may run ahead of the learner: one plain object, without a task and without a clock.

Two bounds, both met by pacing and neither by throwing away:

    in aggregate    groups outstanding + groups trained <= (max_staleness + version + 1) * groups_per_update
                    (AReaL, arXiv:2505.24298, eq. 3), where outstanding groups are in flight, buffered or in training
    per group       version it is trained at - version it was dispatched at <= max_staleness, queues included

A group dispatched at version d must be in one of the updates up to its deadline d + max_staleness. The first bound makes
that possible for every group at the moment it is admitted; `select` keeps it possible: it takes the earliest dispatched of
the complete groups, unless a group with an earlier deadline, still being played, could then no longer be fitted in. In that
case the update waits for that one. A filtered group gives its capacity back at once.
"""

import heapq
from collections.abc import Iterable


class StalenessPolicy:
    """Decides when a group may be admitted and which complete group an update takes next.

    A group is admitted, then complete, then selected, then trained; or it leaves by `filtered` or `evict`.

    Args:
        max_staleness: K, in updates. With 0 an update is made of groups that were dispatched after the one before.
        groups_per_update: B, the groups in every update.
        in_order: select in order of `group_id`, waiting for the lowest, so that the order does not depend on timing.
        max_outstanding: most groups outstanding; never more than the first bound allows.
        num_updates: the version after which nothing is trained; groups that no update will take are not admitted.
        version: updates trained so far.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        groups_per_update: int,
        in_order: bool = False,
        max_outstanding: int | None = None,
        num_updates: int | None = None,
        version: int = 0,
    ) -> None:
        self.max_staleness, self.groups_per_update = max_staleness, groups_per_update
        capacity = (max_staleness + 1) * groups_per_update
        self._capacity = capacity if max_outstanding is None else min(capacity, max_outstanding)
        self._in_order, self._num_updates = in_order, num_updates
        self.version = version
        self.next_update = version
        """The update being filled; ahead of `version` where several are in flight."""

        self._num_selected = 0
        self._dispatch_versions: dict[int, int] = {}
        self._unselected: dict[int, set[int]] = {}
        self._complete: list[tuple[int, int]] = []

    @property
    def num_outstanding(self) -> int:
        """Groups in flight, buffered or in training."""
        return len(self._dispatch_versions)

    def dispatch_version(self, group_id: int) -> int:
        """Version at which an outstanding group was admitted."""
        return self._dispatch_versions[group_id]

    def can_admit(self) -> bool:
        """Whether one more group may be dispatched now."""
        if self._num_updates is None:
            return self.num_outstanding < self._capacity
        return self.num_outstanding < min(self._capacity, (self._num_updates - self.version) * self.groups_per_update)

    def admit(self, group_id: int, dispatch_version: int | None = None) -> int:
        """Count a group as outstanding and give the version it is dispatched at: the learner's, unless it is restored."""
        version = self.version if dispatch_version is None else dispatch_version
        self._dispatch_versions[group_id] = version
        self._unselected.setdefault(version, set()).add(group_id)
        return version

    def complete(self, group_id: int) -> None:
        """A group was played to its end and kept: it can be selected from now on."""
        heapq.heappush(self._complete, (self._dispatch_versions[group_id], group_id))

    def filtered(self, group_id: int) -> None:
        """A group left untrained before it was selected; its capacity is free again."""
        self._remove_unselected(group_id)
        del self._dispatch_versions[group_id]

    def select(self) -> int | None:
        """The group that `next_update` takes next, or None: the update has to wait for one that is still being played."""
        if not self._complete or not self._may_take(*self._complete[0]):
            return None
        _, group_id = heapq.heappop(self._complete)
        self._remove_unselected(group_id)
        self._num_selected += 1
        if self._num_selected == self.groups_per_update:
            self.next_update, self._num_selected = self.next_update + 1, 0
        return group_id

    def trained(self, group_ids: Iterable[int]) -> None:
        """The learner made an update of these groups: its version is one higher and their capacity is free."""
        for group_id in group_ids:
            del self._dispatch_versions[group_id]
        self.version += 1

    def evict(self) -> list[int]:
        """Give up the unselected groups that no schedule can train in time, and name them.

        Pacing leaves none. There are some where a run goes on with a smaller `max_staleness` or fewer groups per update than
        it was saved with. Groups are fitted in by deadline, the earliest first (Moore and Hodgson), so as few as possible
        are given up.
        """
        evicted: list[int] = []
        place = self._num_selected
        for version in sorted(self._unselected):
            for group_id in sorted(self._unselected[version]):
                if self.next_update + place // self.groups_per_update <= version + self.max_staleness:
                    place += 1
                else:
                    evicted.append(group_id)
        lost = set(evicted)
        self._complete = [entry for entry in self._complete if entry[1] not in lost]
        heapq.heapify(self._complete)
        for group_id in evicted:
            self.filtered(group_id)
        return evicted

    def awaited(self) -> list[int]:
        """Unselected groups by dispatch version and id: those the update being filled waits for stand first."""
        return [group_id for version in sorted(self._unselected) for group_id in sorted(self._unselected[version])]

    def _may_take(self, dispatch_version: int, group_id: int) -> bool:
        """Whether all unselected groups can still be trained in time once this one is taken."""
        if self._in_order and any(
            version < dispatch_version or (version == dispatch_version and min(ids) < group_id)
            for version, ids in self._unselected.items()
        ):
            return False
        num_due = 0
        for version in sorted(self._unselected):
            if version >= dispatch_version:
                break
            num_due += len(self._unselected[version])
            updates_left = version + self.max_staleness - self.next_update + 1
            if num_due > updates_left * self.groups_per_update - self._num_selected - 1:
                return False
        return True

    def _remove_unselected(self, group_id: int) -> None:
        version = self._dispatch_versions[group_id]
        self._unselected[version].discard(group_id)
        if not self._unselected[version]:
            del self._unselected[version]
