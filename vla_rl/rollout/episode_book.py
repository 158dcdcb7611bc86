"""The book of a run's episodes: where each one is that was dispatched and has not left yet.

    source ─► admitted ─► to begin ─► running ─► in its group ─► buffered ─► handed to an update ─► trained
                              ▲           │                 └► filtered            └► dropped: too old after a resume
                              └── lost ◄──┘

No task and no clock: `EpisodeScheduler` runs the episodes, and writes here what became of them.
"""

from collections.abc import Iterator, Sequence

import msgspec

from vla_rl.rollout.config import SchedulerConfig
from vla_rl.rollout.groups import GroupSource, SourceState
from vla_rl.rollout.handover import Handover
from vla_rl.rollout.ledger import EpisodeLedger, LedgerState
from vla_rl.rollout.outstanding import GroupState, OutstandingGroups, has_deposits
from vla_rl.rollout.staleness import StalenessPolicy
from vla_rl.types import EpisodeSpec, Group


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a scheduler needs to continue, taken at one instant.

    A resume loses no start and repeats none.
    """

    version: int
    source: SourceState
    ledger: LedgerState
    groups: tuple[GroupState, ...]
    """Outstanding groups: complete ones are buffered (or were in training), others continue with
    the missing members."""


class EpisodeBook:
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
        dispatched_at = min(served_version, self.version)
        while (episode := self.groups.next_episode()) is None:
            if not self.staleness.can_admit(dispatched_at):
                return None
            plan = self._source.next_group()
            self.staleness.admit(plan.group_id, dispatched_at)
            self.groups.add(plan, dispatched_at)
            self._ledger.dispatch(len(plan.episodes))
        return episode

    def again(self, episode: EpisodeSpec) -> None:
        """Queue the next attempt at an episode that was lost, before any newer episode."""
        self.groups.begin_again(_next_attempt(episode))

    def lose(self, member: EpisodeSpec) -> None:
        """Queue the next attempt at a member that ran, and whose arrays are lost."""
        self.groups.lose(_next_attempt(member))

    def filtered(self, group: Group) -> None:
        """Remove a complete group that is not kept; another is admitted instead of it."""
        self.groups.remove(group.group_id)
        self._ledger.filter(len(group.trajectories))
        self.staleness.filtered(group.group_id)

    def trained(self) -> Iterator[Group]:
        """Remove the groups of the oldest update, which was trained on them; yield them."""
        for group in self.handover.trained():
            self._ledger.train(len(group.trajectories))
            self.groups.remove(group.group_id)
            yield group

    def check(self, num_running: int) -> None:
        """Compare the ledger with the episodes held.

        Raises: ConservationError, with the table, if they differ.
        """
        complete, partial = self.groups.num_played()
        in_flight = self.groups.num_to_begin + num_running + partial
        self._ledger.check(in_flight=in_flight, buffered=complete)

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
        self._add_played(state.groups)
        # only after all groups are back: which are too old depends on how many are before them
        for group_id in self.handover.evict():
            plan = self.groups.remove(group_id)
            self._ledger.drop(len(plan.episodes), "stale")
            self._source.give_back(plan)

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

    def _add_played(self, groups: Sequence[GroupState]) -> None:
        for saved in groups:
            self.staleness.admit(saved.plan.group_id, saved.dispatch_version)
            group = self.groups.add_played(saved)
            if group is not None and not has_deposits(group):
                self.handover.add(group)


def _next_attempt(episode: EpisodeSpec) -> EpisodeSpec:
    return msgspec.structs.replace(episode, attempt=episode.attempt + 1)
