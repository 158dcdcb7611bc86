"""The episode scheduler: runs groups of episodes without end, as far ahead of the learner as
staleness allows.

        source ──► admit ──► episodes, one coroutine each ──► group complete ──► keep? ──► buffer ──► groups_for_update
                     ▲         agent(env, policy)                                  │                        │
                     └───────────── capacity given back ◄──────────────── filtered ┘ ◄───────── trained ────┘

A finished episode is replaced at once, and a complete group is handed over at once. What always
holds:

    - at most `pool.num_envs` episodes run; a group is admitted only if an environment would otherwise be idle;
    - the buffer is bounded by the staleness policy: while it is full nothing is admitted, and environments are idle;
    - an episode lost to a dead or frozen process is run again from the same task, state and seed, in the same group;
    - each dispatched episode is, at every update, in exactly one place (`EpisodeLedger`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec

from vla_rl.actors.waits import note_progress, waiting
from vla_rl.errors import ConfigError
from vla_rl.rollout.config import SchedulerConfig
from vla_rl.rollout.groups import GroupSource, SourceState
from vla_rl.rollout.ledger import EpisodeLedger, LedgerState
from vla_rl.rollout.meter import RolloutMeter
from vla_rl.rollout.outstanding import GroupState, OutstandingGroups
from vla_rl.rollout.owned_tasks import leave
from vla_rl.rollout.playing import EpisodeLost, play_episode
from vla_rl.rollout.policies import AnyEngine, EngineTeam
from vla_rl.rollout.staleness import StalenessPolicy
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Group, Trajectory

logger = logging.getLogger(__name__)

WARN_EVERY: Final = 10
"""Groups filtered in a row between two warnings."""


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a scheduler needs to continue, taken at one instant: a resume loses no start and
    repeats none.
    """

    version: int
    source: SourceState
    ledger: LedgerState
    groups: tuple[GroupState, ...]
    """Outstanding groups: complete ones are buffered (or were in training), others continue with
    the missing members."""


class EpisodeScheduler:
    """Runs episodes and hands over groups; `async with` owns all its tasks.

    Args:
        pool: environments; one episode runs in each.
        engine: the policy. Its `weight_version` is the learner's by the time `trained` is called:
            publish first.
        agent: runs one episode.
        source: the groups to run.
        config: sizes, staleness and the handling of faults.
        keep: called with each complete group; if it returns False the group is filtered and
            replaced. It must depend on the group alone.
        on_episode: called with the trajectory of every episode that ended, before its group is
            complete.
        num_updates: updates of the whole run, with those before a resume; episodes that none of
            them would train on are not started. None: no end.

    An error of the agent, the environment or `keep` cancels all other episodes. The `async with`
    block raises it unchanged, with a note that names the episode.
    """

    def __init__(
        self,
        pool: EnvPool,
        engine: AnyEngine,
        agent: Agent,
        source: GroupSource,
        config: SchedulerConfig,
        *,
        keep: Callable[[Group], bool] | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
        num_updates: int | None = None,
    ) -> None:
        config.require_feasible(num_envs=pool.num_envs, group_size=source.group_size)
        self._pool, self._engine, self._agent, self._source, self._config = (
            pool,
            EngineTeam.of(engine),
            agent,
            source,
            config,
        )
        self._keep, self._on_episode, self._num_updates = keep, on_episode, num_updates
        self._staleness = self._new_staleness_policy(0)
        self._groups, self._ledger, self._meter = (
            OutstandingGroups(),
            EpisodeLedger(),
            RolloutMeter(),
        )
        self._ready: dict[int, Group] = {}
        self._handed: dict[int, list[Group]] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._filtered_in_a_row = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._is_open = self._is_left = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start running episodes."""
        if self._tasks is not None:
            raise RuntimeError(
                "this scheduler was opened before; make a new one and restore the "
                "state of the old one"
            )
        if self._engine.weight_version < self.version:
            raise ConfigError(
                f"the engine serves weight version {self._engine.weight_version}, the scheduler "
                "continues at "
                f"{self.version}; load the weights of the same checkpoint first"
            )
        self._meter.start(asyncio.get_running_loop().time())
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._is_open = True
        self._fill()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop: cancel the episodes, the oldest first, and wait for them to end.

        `state` stays valid.
        """
        assert self._tasks is not None
        self._is_open, self._is_left = False, True
        self._wake()
        for episode_id in sorted(self._playing):
            self._playing[episode_id].cancel()
        await leave(self._tasks, kind, error, traceback)

    @property
    def version(self) -> int:
        """Updates trained so far; the weight version that episodes are dispatched at."""
        return self._staleness.version

    async def groups_for_update(self, update: int) -> AsyncIterator[Group]:
        """Yield the `groups_per_update` groups of an update, each as soon as it is complete and its
        turn has come.

        Updates are filled one after the other, up to `max_staleness` ahead of the one in training.
        Asking for the same update again, after an iteration was interrupted, gives the same groups
        again and then the rest.

        Args:
            update: counted from 0; the update that makes version `update + 1` out of version
                `update`.

        Raises: ValueError if the update was trained already, or is not one of the run's
        `num_updates`; RuntimeError if the scheduler is not open, or is closed.
        """
        if update < self.version:
            raise ValueError(f"update {update} was trained already, the next one is {self.version}")
        if self._num_updates is not None and update >= self._num_updates:
            raise ValueError(
                f"update {update} is not one of the run's {self._num_updates}, counted from 0, "
                "and no episode is run for "
                "it; stop there, or make the scheduler with more num_updates"
            )
        for place in range(self._config.groups_per_update):
            while len(self._handed.get(update, ())) <= place:
                if not self._select_for(update):
                    self._require_running()
                    with waiting(f"update {update}", on=self.waiting_for()):
                        await self._changed.wait()
            yield self._handed[update][place]

    def trained(self, groups: Sequence[Group], new_version: int) -> None:
        """Report that the learner trained `new_version` on these groups and that the engine serves
        it.

        Raises: ConservationError if an episode is missing or held twice; ValueError if these are
        not the groups that were handed over for this update, or the engine still serves older
        weights.
        """
        handed = {group.group_id: group for group in self._handed.get(self.version, ())}
        if new_version != self.version + 1 or {group.group_id for group in groups} != handed.keys():
            raise ValueError(
                f"trained on groups {sorted(group.group_id for group in groups)} to version "
                f"{new_version}, expected version "
                f"{self.version + 1} from the groups handed over for update {self.version}: "
                f"{sorted(handed)}"
            )
        if len(handed) < self._config.groups_per_update:
            raise ValueError(
                f"update {self.version} has {len(handed)} of {self._config.groups_per_update} "
                "groups so far"
            )
        if self._engine.weight_version < new_version:
            raise ValueError(
                f"the engine serves version {self._engine.weight_version}, expected "
                f"{new_version}: publish the weights "
                "first, so that episodes dispatched from now on use them"
            )
        for group in handed.values():
            self._ledger.train(len(group.trajectories))
            self._meter.trained(group, self.version)
            self._groups.remove(group.group_id)
        del self._handed[self.version]
        self._staleness.trained(handed)
        note_progress("updates")
        self.check_conservation()
        self._fill()
        self._wake()

    def check_conservation(self) -> None:
        """Compare the ledger with the episodes held.

        Raises: ConservationError, with the table, if they differ.
        """
        complete, partial = self._groups.num_played()
        self._ledger.check(
            in_flight=self._groups.num_to_begin + len(self._playing) + partial, buffered=complete
        )

    def state(self) -> SchedulerState:
        """Return all that is needed to continue, as of now; also after the scheduler was closed."""
        self.check_conservation()
        return SchedulerState(
            version=self.version,
            source=self._source.state(),
            ledger=self._ledger.state(),
            groups=self._groups.state(),
        )

    def restore(self, state: SchedulerState) -> None:
        """Continue where `state` was taken; call it before `async with`. Groups that are too old to
        be trained are dropped.

        Raises: RuntimeError if the scheduler is open; ConfigError if `state` does not fit the
        source.
        """
        if self._tasks is not None:
            raise RuntimeError("restore a scheduler before it is opened")
        self._source.restore(state.source)
        self._staleness = self._new_staleness_policy(state.version)
        self._groups, self._ledger = OutstandingGroups(), EpisodeLedger(state.ledger)
        for saved in state.groups:
            group_id = saved.plan.group_id
            self._staleness.admit(group_id, saved.dispatch_version)
            group = self._groups.add_played(saved)
            if group is not None:
                self._ready[group_id] = group
                self._staleness.complete(group_id)
        for group_id in self._staleness.evict():
            plan = self._groups.remove(group_id)
            self._ready.pop(group_id, None)
            self._ledger.drop(len(plan.episodes), "stale")
            self._source.give_back(plan)
        self.check_conservation()

    def metrics(self) -> dict[str, float]:
        """Return rates since the last call, queue depths, and losses since the run started.

        Keys begin with `rollout/`.
        """
        depths = {
            "episodes_playing": len(self._playing),
            "episodes_to_begin": self._groups.num_to_begin,
            "decisions_waiting": self._meter.gauge.num_waiting,
            "groups_buffered": len(self._ready),
            "groups_in_training": sum(len(groups) for groups in self._handed.values()),
            "groups_outstanding": self._staleness.num_outstanding,
        }
        return self._meter.report(asyncio.get_running_loop().time(), depths, self._ledger.dropped)

    def waiting_for(self) -> str:
        """Describe in words what the update being filled waits for."""
        update = self._staleness.next_update
        missing = self._config.groups_per_update - len(self._handed.get(update, ()))
        being_played = [
            group_id for group_id in self._staleness.awaited() if group_id not in self._ready
        ]
        if not being_played:
            return f"update {self.version} to be trained"
        episodes = self._groups.missing(being_played[0])
        return (
            f"{missing} of {self._config.groups_per_update} groups, the oldest of "
            f"{len(being_played)} running is group "
            f"{being_played[0]}: episodes {', '.join(map(str, episodes))}"
        )

    def _new_staleness_policy(self, version: int) -> StalenessPolicy:
        return StalenessPolicy(
            max_staleness=self._config.max_staleness,
            groups_per_update=self._config.groups_per_update,
            in_order=self._config.deterministic,
            max_outstanding=self._config.max_outstanding_groups,
            num_updates=self._num_updates,
            version=version,
        )

    def _select_for(self, update: int) -> bool:
        """Hand one more group to `update` if it is the one being filled and a group may be
        taken.
        """
        if update != self._staleness.next_update:
            return False
        group_id = self._staleness.select()
        if group_id is None:
            return False
        self._handed.setdefault(update, []).append(self._ready.pop(group_id))
        if self._staleness.next_update != update:
            self._wake()
        return True

    def _require_running(self) -> None:
        """Raise instead of waiting for groups that will not come.

        A run that fails cancels its owner before it is left.
        """
        if self._tasks is None or self._is_left:
            raise RuntimeError(
                "no group will come: the scheduler is not open; iterate inside its `async with`"
            ) from self._failure

    def _wake(self) -> None:
        """Wake every task that waits in `groups_for_update`, so that it looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _fill(self) -> None:
        """Start episodes until every environment is in use or staleness allows no more."""
        while self._is_open and len(self._playing) < self._pool.num_envs:
            episode = self._groups.next_episode()
            if episode is None:
                if not self._staleness.can_admit():
                    return
                plan = self._source.next_group()
                self._groups.add(plan, self._staleness.admit(plan.group_id))
                self._ledger.dispatch(len(plan.episodes))
                continue
            assert self._tasks is not None
            task = self._tasks.create_task(
                self._play(episode), name=f"episode {episode.episode_id}"
            )
            self._playing[episode.episode_id] = task

    async def _play(self, episode: EpisodeSpec) -> None:
        """Run one episode and start the next.

        A cancelled episode stays in flight: it is run after a resume.
        """
        try:
            trajectory = await play_episode(
                self._pool,
                self._engine,
                self._agent,
                episode,
                timeout_s=self._config.episode_timeout_s,
                gauge=self._meter.gauge,
            )
            self._finish(trajectory)
        except EpisodeLost as loss:
            if loss.episode.attempt + 1 < self._config.max_attempts:
                self._play_again(loss)
            elif self._fails_the_run(loss):
                loss.add_note(f"that was the last of max_attempts={self._config.max_attempts}")
                raise
        except Exception as error:
            if self._fails_the_run(error):
                raise
        self._fill()

    def _fails_the_run(self, error: Exception) -> bool:
        """Return whether this is the first error.

        Later ones, until all episodes have ended, become notes on it.
        """
        if self._failure is not None:
            # a batch that fails gives all its episodes the same error
            if error is not self._failure:
                self._failure.add_note(
                    f"another episode failed too: {type(error).__name__}: {error}"
                )
            return False
        self._failure = error
        # the task group cancels the others; no new episode may start meanwhile
        self._is_open = False
        return True

    def _finish(self, trajectory: Trajectory) -> None:
        """Record a finished episode and, with the last member, its group."""
        del self._playing[trajectory.episode.episode_id]
        group = self._groups.finish(trajectory)
        self._meter.episode(trajectory)
        if self._on_episode is not None:
            self._on_episode(trajectory)
        note_progress("episodes")
        if group is None:
            return
        is_kept = self._keep is None or self._keep(group)
        self._meter.group(kept=is_kept)
        if is_kept:
            self._filtered_in_a_row = 0
            self._ready[group.group_id] = group
            self._staleness.complete(group.group_id)
        else:
            self._filtered_in_a_row += 1
            self._groups.remove(group.group_id)
            self._ledger.filter(len(group.trajectories))
            self._staleness.filtered(group.group_id)
            self._require_some_kept()
        self._wake()

    def _require_some_kept(self) -> None:
        limit = self._config.max_filtered_in_a_row
        if self._filtered_in_a_row % WARN_EVERY == 0:
            logger.warning(
                "%d groups in a row were filtered and none was kept: update %d is waiting for one",
                self._filtered_in_a_row,
                self._staleness.next_update,
            )
        if limit is not None and self._filtered_in_a_row >= limit:
            raise RuntimeError(
                f"{limit} groups in a row were filtered and none was kept, so update "
                f"{self._staleness.next_update} would "
                "never be filled; loosen the filter, choose tasks that are sometimes solved, or "
                "raise max_filtered_in_a_row"
            )

    def _play_again(self, loss: EpisodeLost) -> None:
        """Run the same episode again, before any newer one."""
        episode = loss.episode
        self._meter.lost(loss.kind)
        del self._playing[episode.episode_id]
        self._groups.begin_again(msgspec.structs.replace(episode, attempt=episode.attempt + 1))
