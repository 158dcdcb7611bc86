"""The bound on how far generation runs ahead of the learner, as an option, a policy, a buffer.

`SchedulerConfig.max_staleness` sets it, `StalenessPolicy` is one plain object without task or clock, and
`Handover` holds the complete groups until their update was trained.

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
from collections.abc import Callable, Iterable, Iterator, Sequence

from vla_rl.errors import ConfigError
from vla_rl.types import Config, Group, NonNegativeInt, PositiveFloat, PositiveInt


class SchedulerConfig(Config, frozen=True, kw_only=True):
    """Settings for the groups of an update, the staleness of episodes, and lost episodes."""

    groups_per_update: PositiveInt
    """Groups that each update trains on."""

    max_staleness: NonNegativeInt = 1
    """Most updates between the dispatch of a group and its training. 0 is synchronous
    training."""

    max_outstanding_groups: int | None = None
    """Most groups in flight, buffered or in training at the same time. None: as many as staleness
    allows. Lower it to save memory."""

    deterministic: bool = False
    """Hand groups over in order of `group_id`, so that a run can be repeated exactly. Needs
    `max_staleness=0`, and an engine whose answers do not depend on their batch."""

    max_attempts: PositiveInt = 3
    """Times an episode is started, at most. If the last attempt too is lost to a dead or frozen
    process, the run fails. Losses of whole hosts do not count."""

    episode_timeout_s: PositiveFloat | None = None
    """Most seconds from the lease of an environment to the end of its episode; an episode that
    takes longer counts as lost. None: no limit."""

    max_filtered_in_a_row: PositiveInt | None = 1000
    """Groups filtered in a row, with none kept, after which the run fails instead of continuing for
    ever. None: never."""

    def __post_init__(self) -> None:
        if self.deterministic and self.max_staleness > 0:
            raise ConfigError(
                f"deterministic=True with max_staleness={self.max_staleness}: the weights that act "
                "would depend on timing; expected max_staleness=0"
            )

    @property
    def group_capacity(self) -> int:
        """Most groups in flight, buffered or in training at the same time."""
        by_staleness = (self.max_staleness + 1) * self.groups_per_update
        return (
            by_staleness
            if self.max_outstanding_groups is None
            else min(by_staleness, self.max_outstanding_groups)
        )

    def require_feasible(self, *, num_envs: int, group_size: int) -> None:
        """Raise `ConfigError` if updates could never fill, or environments never be used.

        The error has the inequality.
        """
        if self.group_capacity < self.groups_per_update:
            raise ConfigError(
                f"max_outstanding_groups={self.max_outstanding_groups} < "
                f"groups_per_update={self.groups_per_update}: no update could ever be filled; "
                "raise max_outstanding_groups"
            )
        # Refused instead of ignored: simulators that are never used look like a slow run, and cost
        # memory.
        episodes = self.group_capacity * group_size
        if episodes < num_envs:
            limit = "(max_staleness + 1) * groups_per_update"
            values = f"({self.max_staleness} + 1) * {self.groups_per_update}"
            if self.group_capacity < (self.max_staleness + 1) * self.groups_per_update:
                limit, values = "max_outstanding_groups", str(self.max_outstanding_groups)
            raise ConfigError(
                f"{limit} * group_size = {values} * {group_size} = {episodes} < num_envs = "
                f"{num_envs}: {num_envs - episodes} environments would never be used; use num_envs "
                f"<= {episodes}, or larger updates"
            )


class StalenessPolicy:
    """Decides when a group may be admitted and which complete group an update takes next.

    A group is admitted, then complete, then selected, then trained; or it leaves through `remove_filtered`
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
        # One update in training and max_staleness more that are filled meanwhile: with 0, nothing
        # begins until the update is trained.
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

    def remove_filtered(self, group_id: int) -> None:
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
        # Counted when a group is handed over and not when its update begins: nodes may take groups
        # of an update while it still fills.
        self._num_selected += 1
        if self._num_selected == self.groups_per_update:
            self.next_update, self._num_selected = self.next_update + 1, 0
        return group_id

    def remove_trained(self, group_ids: Iterable[int]) -> None:
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
        index = self._num_selected
        for version in sorted(self._unselected):
            for group_id in sorted(self._unselected[version]):
                if (
                    self.next_update + index // self.groups_per_update
                    <= version + self.max_staleness
                ):
                    index += 1
                else:
                    evicted.append(group_id)
        lost = set(evicted)
        self._complete = [entry for entry in self._complete if entry[1] not in lost]
        heapq.heapify(self._complete)
        for group_id in evicted:
            self.remove_filtered(group_id)
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


class Handover:
    """Holds complete groups until the update that they are handed to was trained.

    Args:
        staleness: decides which group an update takes next.
    """

    def __init__(self, staleness: StalenessPolicy) -> None:
        self._staleness = staleness
        self._ready: dict[int, Group] = {}
        self._handed: dict[int, list[Group]] = {}

    @property
    def num_buffered(self) -> int:
        """Complete groups that no update has yet."""
        return len(self._ready)

    @property
    def num_in_training(self) -> int:
        """Groups that were handed to an update, which may still be waiting for others."""
        return sum(len(groups) for groups in self._handed.values())

    def add_group(self, group: Group) -> None:
        """Add a complete group that was kept."""
        self._ready[group.group_id] = group
        self._staleness.complete(group.group_id)

    def evict(self) -> Iterator[int]:
        """Remove the groups that are too old to be trained, complete or not; yield their ids."""
        for group_id in self._staleness.evict():
            self._ready.pop(group_id, None)
            yield group_id

    def get_groups(self, update: int) -> Sequence[Group]:
        """Return the groups that an update has so far."""
        return self._handed.get(update, ())

    def hand_over(self, update: int) -> bool:
        """Hand one more group to `update` if it is being filled and a group may be taken."""
        # a later update may already be asking; it must not take what this one still needs
        if update != self._staleness.next_update:
            return False
        group_id = self._staleness.select()
        if group_id is None:
            return False
        self._handed.setdefault(update, []).append(self._ready.pop(group_id))
        return True

    def require_groups(self, groups: Sequence[Group], new_version: int) -> None:
        """Raise ValueError unless `groups` are all those of the update that makes `new_version`."""
        version, size = self._staleness.version, self._staleness.groups_per_update
        given = {group.group_id for group in groups}
        handed = {group.group_id for group in self.get_groups(version)}
        if new_version != version + 1 or given != handed:
            raise ValueError(
                f"trained on groups {sorted(group.group_id for group in groups)} to version "
                f"{new_version}, expected version {version + 1} from the groups handed over for "
                f"update {version}: {sorted(handed)}"
            )
        if len(handed) < size:
            raise ValueError(f"update {version} has {len(handed)} of {size} groups so far")

    def take_trained(self) -> list[Group]:
        """Remove the groups of the oldest update, which was trained on them, and return them."""
        groups = self._handed.pop(self._staleness.version)
        self._staleness.remove_trained(group.group_id for group in groups)
        return groups

    def describe_wait(self, missing: Callable[[int], Sequence[int]]) -> str:
        """Describe what the update being filled waits for.

        Args:
            missing: returns the episodes of a group that were not run yet.
        """
        size = self._staleness.groups_per_update
        num_missing = size - len(self.get_groups(self._staleness.next_update))
        oldest = self._staleness.oldest_running()
        if oldest is None:
            return f"update {self._staleness.version} to be trained"
        episodes = ", ".join(map(str, missing(oldest)))
        return (
            f"{num_missing} of {size} groups, the oldest of {self._staleness.num_running} running "
            f"is group {oldest}: "
            + (
                f"episodes {episodes}"
                if episodes
                else "its arrays are on their way from other hosts"
            )
        )
