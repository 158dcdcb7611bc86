"""The complete groups, and the update that each is handed to.

complete ─► buffered ─► handed to an update ─► trained
               └ the staleness policy says which is next
"""

from collections.abc import Callable, Iterator, Sequence

from vla_rl.rollout.staleness import StalenessPolicy
from vla_rl.types import Group


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

    def add(self, group: Group) -> None:
        """Add a complete group that was kept."""
        self._ready[group.group_id] = group
        self._staleness.complete(group.group_id)

    def evict(self) -> Iterator[int]:
        """Remove the groups that are too old to be trained, complete or not; yield their ids."""
        for group_id in self._staleness.evict():
            self._ready.pop(group_id, None)
            yield group_id

    def groups_of(self, update: int) -> Sequence[Group]:
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
        handed = {group.group_id for group in self.groups_of(version)}
        if new_version != version + 1 or given != handed:
            raise ValueError(
                f"trained on groups {sorted(group.group_id for group in groups)} to version "
                f"{new_version}, expected version {version + 1} from the groups handed over for "
                f"update {version}: {sorted(handed)}"
            )
        if len(handed) < size:
            raise ValueError(f"update {version} has {len(handed)} of {size} groups so far")

    def trained(self) -> list[Group]:
        """Remove the groups of the oldest update, which was trained on them, and return them."""
        groups = self._handed.pop(self._staleness.version)
        self._staleness.trained(group.group_id for group in groups)
        return groups

    def describe_wait(self, missing: Callable[[int], Sequence[int]]) -> str:
        """Describe what the update being filled waits for.

        Args:
            missing: returns the episodes of a group that were not run yet.
        """
        size = self._staleness.groups_per_update
        num_missing = size - len(self.groups_of(self._staleness.next_update))
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
