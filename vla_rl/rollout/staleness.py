"""The bound on how far generation runs ahead of the learner: one plain object.

It has no task and no clock.

Two bounds, both met by delaying dispatch and neither by discarding groups:

    in aggregate    groups outstanding + groups trained <= (max_staleness + version + 1) * groups_per_update
                    (AReaL, arXiv:2505.24298, eq. 3), where outstanding groups are in flight, buffered or in training
    per group       version it is trained at - version it was dispatched at <= max_staleness, queues included

A group is dispatched at the version that every engine serves. That may be older than the learner's while
new weights are on their way to other hosts; then both bounds are those of the older version.

A group dispatched at version d must be in one of the updates up to its deadline d + max_staleness.
The first bound makes that possible for every group at the moment it is admitted. `select` keeps it
possible: it takes the earliest dispatched of the complete groups, unless a running group with an
earlier deadline would then miss it. In that case the update waits for that group. A filtered group
frees its capacity at once.
"""

import heapq
from collections.abc import Iterable


class StalenessPolicy:
    """Decides when a group may be admitted and which complete group an update takes next.

    A group is admitted, then complete, then selected, then trained; or it leaves through `filtered`
    or `evict`.

    Args:
        max_staleness: K, in updates. With 0 an update trains on groups that were dispatched after
            the update before it.
        groups_per_update: B, the number of groups in every update.
        in_order: select in order of `group_id`, waiting for the lowest, so that the order does not
            depend on timing.
        max_outstanding: most groups outstanding; never more than the first bound allows.
        num_updates: the last version; groups that no update would train on are not admitted. None:
            no last version.
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
        """The update being filled; ahead of `version` if several are in flight."""

        self._num_selected = 0
        self._dispatch_versions: dict[int, int] = {}
        self._unselected: dict[int, set[int]] = {}
        self._complete: list[tuple[int, int]] = []
        self._running: set[int] = set()
        self._by_deadline: list[tuple[int, int]] = []

    @property
    def num_outstanding(self) -> int:
        """Groups in flight, buffered or in training."""
        return len(self._dispatch_versions)

    def dispatch_version(self, group_id: int) -> int:
        """Version at which an outstanding group was admitted."""
        return self._dispatch_versions[group_id]

    def can_admit(self, served_version: int) -> bool:
        """Whether one more group may be dispatched now, at a version that engines serve."""
        num_behind = self.version - served_version
        updates_left = self.max_staleness + 1 - num_behind
        if self._num_updates is not None:
            # near the end the bound of staleness would admit groups that no update is left for
            updates_left = min(updates_left, self._num_updates - self.version)
        return self.num_outstanding < min(self._capacity, updates_left * self.groups_per_update)

    def admit(self, group_id: int, dispatch_version: int) -> None:
        """Count a group as outstanding."""
        self._dispatch_versions[group_id] = dispatch_version
        self._unselected.setdefault(dispatch_version, set()).add(group_id)
        self._running.add(group_id)
        heapq.heappush(self._by_deadline, (dispatch_version, group_id))

    def complete(self, group_id: int) -> None:
        """Mark a group as run to its end and kept, so that it can be selected."""
        heapq.heappush(self._complete, (self._dispatch_versions[group_id], group_id))
        self._running.discard(group_id)

    def filtered(self, group_id: int) -> None:
        """Remove a group that was not selected, and free its capacity."""
        self._remove_unselected(group_id)
        self._running.discard(group_id)
        del self._dispatch_versions[group_id]

    def select(self) -> int | None:
        """Return the group that `next_update` takes next; None if it waits for a running one."""
        if not self._complete or not self._may_take(*self._complete[0]):
            return None
        _, group_id = heapq.heappop(self._complete)
        self._remove_unselected(group_id)
        self._num_selected += 1
        if self._num_selected == self.groups_per_update:
            self.next_update, self._num_selected = self.next_update + 1, 0
        return group_id

    def trained(self, group_ids: Iterable[int]) -> None:
        """Remove the groups of an update, free their capacity and raise the version by one."""
        for group_id in group_ids:
            del self._dispatch_versions[group_id]
        self.version += 1

    def evict(self) -> list[int]:
        """Drop the unselected groups that no schedule can train in time, and return their ids.

        In normal operation there are none. There are some if a run is resumed with a smaller
        `max_staleness` or fewer groups per update than it was saved with. Groups are scheduled by
        deadline, the earliest first (Moore and Hodgson), so as few as possible are dropped.
        """
        evicted: list[int] = []
        place = self._num_selected
        for version in sorted(self._unselected):
            for group_id in sorted(self._unselected[version]):
                if (
                    self.next_update + place // self.groups_per_update
                    <= version + self.max_staleness
                ):
                    place += 1
                else:
                    evicted.append(group_id)
        lost = set(evicted)
        self._complete = [entry for entry in self._complete if entry[1] not in lost]
        heapq.heapify(self._complete)
        for group_id in evicted:
            self.filtered(group_id)
        return evicted

    @property
    def num_running(self) -> int:
        """Groups that are not complete."""
        return len(self._running)

    def oldest_running(self) -> int | None:
        """Return the incomplete group by dispatch version and id that the next update waits for."""
        # asked whenever a group completes: sorting all of them each time took 2 s of the loop at
        # 4,096 groups an update
        while self._by_deadline and self._by_deadline[0][1] not in self._running:
            heapq.heappop(self._by_deadline)
        return self._by_deadline[0][1] if self._by_deadline else None

    def _may_take(self, dispatch_version: int, group_id: int) -> bool:
        """Return whether all other groups can still be trained in time if this one is taken."""
        if self._in_order and any(
            version < dispatch_version or (version == dispatch_version and min(ids) < group_id)
            for version, ids in self._unselected.items()
        ):
            return False
        # only running groups with an earlier deadline can suffer: the heap gives the earliest of the
        # complete ones, and taking it costs each of those a place in the updates that are left
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
