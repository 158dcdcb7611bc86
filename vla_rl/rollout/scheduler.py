"""The episode scheduler: runs groups of episodes without end.

It runs as far ahead of the learner as staleness allows.

        source ──► admit ──► episodes, one coroutine each ──► group complete ──► keep? ──► buffer ──► groups_for_update
                     ▲         runner.run_episode(episode)                                │                        │
                     └───────────── capacity given back ◄──────────────── filtered ┘ ◄───────── trained ────┘

A finished episode is replaced at once, and a complete group is handed over at once. What always
holds:

    - at most `runner.num_slots` episodes begin to run; a group is admitted only if a slot would otherwise be idle;
    - the buffer is bounded by the staleness policy: while it is full nothing is admitted, and slots are idle;
    - an episode lost to a dead or frozen process is run again from the same task, state and seed, in the same group;
    - each dispatched episode is, at every update, in exactly one place (`EpisodeRecords`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from vla_rl.errors import ConfigError
from vla_rl.rollout.counts import Attempts, GroupFilter, RolloutMetrics
from vla_rl.rollout.episode_records import EpisodeRecords, SchedulerState, has_references
from vla_rl.rollout.episode_runner import EpisodeLost, EpisodeRunner
from vla_rl.rollout.episode_tasks import RunningEpisodes
from vla_rl.rollout.groups import GroupSource
from vla_rl.rollout.staleness import SchedulerConfig
from vla_rl.types import EpisodeRef, EpisodeSpec, Group, Trajectory
from vla_rl.util.stalls import note_progress, waiting


class EpisodeScheduler:
    """Runs episodes and hands over groups; `async with` owns all its tasks.

    Args:
        runner: runs the episodes. Its `pending_version` is the learner's by the time `mark_trained` is
            called: publish first.
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
        runner: EpisodeRunner,
        source: GroupSource,
        config: SchedulerConfig,
        *,
        keep: Callable[[Group], bool] | None = None,
        on_episode: Callable[[Trajectory], None] | None = None,
        num_updates: int | None = None,
    ) -> None:
        # Before any process starts: a run whose updates can never fill would otherwise wait for
        # ever, with every simulator idle.
        config.require_feasible(num_envs=runner.num_slots, group_size=source.group_size)
        self._runner, self._config = runner, config
        self._on_episode, self._num_updates = on_episode, num_updates
        self._filter = GroupFilter(keep, config.max_filtered_in_a_row)
        self._records, self._metrics = (
            EpisodeRecords(source, config, num_updates),
            RolloutMetrics(runner.decisions),
        )
        self._running, self._attempts = RunningEpisodes(), Attempts(config.max_attempts)
        self._arrays = ArrayFetches(
            runner, self._records, self._running, self._metrics, on_end=self._look_again
        )
        self._changed = asyncio.Event()
        runner.on_more_capacity(self._fill)

    async def __aenter__(self) -> Self:
        """Start running episodes."""
        if self._running.was_opened:
            raise RuntimeError(
                "this scheduler was opened before; make a new one and restore the old one's state"
            )
        # Episodes of older weights than the checkpoint's would be counted as fresher than they are,
        # and the staleness bound would not hold.
        if self._runner.weight_version < self.version:
            raise ConfigError(
                f"the engine serves weight version {self._runner.weight_version}, the scheduler "
                f"continues at {self.version}; load the weights of the same checkpoint first"
            )
        self._metrics.start_window(asyncio.get_running_loop().time())
        await self._running.open_tasks()
        self._arrays.resume_fetches()
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
        self._running.cancel_all()
        # before the wait, because a node may be waiting for a group that will not come
        self._wake()
        await self._running.wait_until_ended(kind, error, traceback)

    @property
    def version(self) -> int:
        """Updates trained so far."""
        return self._records.version

    async def groups_for_update(self, update: int) -> AsyncIterator[Group]:
        """Yield the groups of an update, each as soon as it is complete and its turn has come.

        They are `groups_per_update`.

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
                f"update {update} is not one of the run's {self._num_updates}, counted from 0, and "
                "no episode is run for it; stop there, or make the scheduler with more num_updates"
            )
        # By position and not by what is new: an update that was interrupted asks again, and has to
        # get the same groups.
        for index in range(self._config.groups_per_update):
            # looked at again after every wake: another update may have taken what completed
            while len(self._records.handover.get_groups(update)) <= index:
                if not self._hand_over(update):
                    # A node of a later update may ask after the run has failed: it would wait for
                    # groups that no episode will complete.
                    self._running.require_running()
                    with waiting(f"update {update}", on=self.describe_wait()):
                        await self._changed.wait()
            yield self._records.handover.get_groups(update)[index]

    def mark_trained(self, groups: Sequence[Group], new_version: int) -> None:
        """Report that the learner trained `new_version` on these groups, and has published it.

        While it is on its way to other hosts, groups are dispatched at the version that all of them
        serve, as far as staleness allows.

        Raises: ConservationError if an episode is missing or held twice; ValueError if these are
        not the groups that were handed over for this update, or the weights are not published.
        """
        # all checks before any count: a rejected call must leave the ledger as it was
        self._records.handover.require_groups(groups, new_version)
        if self._runner.pending_version < new_version:
            raise ValueError(
                f"the engine serves version {self._runner.pending_version}, expected "
                f"{new_version}: publish the weights first, so that episodes dispatched from now "
                "on use them"
            )
        version = self.version
        for group in self._records.take_trained():
            self._metrics.count_trained(group, version)
            for member in group.trajectories:
                self._runner.drop_arrays(member)
        # `vla-rl why` and the watch for stalls compare this with the time: a run that makes no
        # update for long is reported.
        note_progress("updates")
        # between counting and dispatching: every episode is in one place now, and none has begun
        self.check_conservation()
        self._look_again()

    def check_conservation(self) -> None:
        """Compare the ledger with the episodes held.

        Raises: ConservationError, with the table, if they differ.
        """
        self._records.check_conservation(len(self._running))

    def state(self) -> SchedulerState:
        """Return all that is needed to continue, as of now; also after the scheduler was closed."""
        self.check_conservation()
        return self._records.state()

    def restore(self, state: SchedulerState) -> None:
        """Continue where `state` was taken; call it before `async with`.

        Groups that are too old to be trained are dropped.

        Raises: RuntimeError if the scheduler is open; ConfigError if `state` does not fit the
        source.
        """
        if self._running.was_opened:
            raise RuntimeError("restore a scheduler before it is opened")
        self._records.restore(state)
        self.check_conservation()

    def episode_refs(self) -> tuple[EpisodeRef, ...]:
        """Return the places on other hosts of all arrays that are needed still."""
        return tuple(
            member.episode_ref
            for member in self._records.groups.stored_members()
            if member.episode_ref
        )

    def metrics(self) -> dict[str, float]:
        """Return rates since the last call, queue depths, and losses since the run started.

        Keys begin with `rollout/`.
        """
        now = asyncio.get_running_loop().time()
        # Of this moment and not means: a queue that grows shows at once which side is too slow.
        depths = {
            "episodes_running": len(self._running),
            "episodes_to_begin": self._records.groups.num_to_begin,
            "decisions_waiting": self._runner.decisions(now).num_waiting,
            "groups_buffered": self._records.handover.num_buffered,
            "groups_in_training": self._records.handover.num_in_training,
            "groups_outstanding": self._records.staleness.num_outstanding,
        }
        return self._metrics.report(now, depths, self._records.dropped)

    def describe_wait(self) -> str:
        """Describe in words what the update being filled waits for."""
        return self._records.handover.describe_wait(self._records.groups.missing)

    def _hand_over(self, update: int) -> bool:
        """Hand one more group to `update`, and wake the next update once this one is full."""
        is_selected = self._records.handover.hand_over(update)
        if is_selected and self._records.staleness.next_update != update:
            self._wake()
        return is_selected

    def _look_again(self) -> None:
        """Hand over what has come, and start what was lost."""
        self._wake()
        self._fill()

    # who waits             for                         woken by
    # `groups_for_update`   `_changed`                  a group that is complete or filtered, an update that is
    #                                                   full or trained, the scheduler's end
    # `_run_episode`        `runner.run_episode`        the runner: the end of the episode, or its loss
    # an idle slot          no task waits for it:       an episode that ended, an update that was trained,
    #                       `_fill` looks at all        a host that came or has new weights, lost arrays
    # `ArrayFetches._fetch` `runner.materialise`        the runner: the arrays, or the loss of their host
    # `__aexit__`           the end of all tasks        episodes and fetches, cancelled just before

    def _wake(self) -> None:
        """Wake every task that waits in `groups_for_update`, so that it looks again."""
        # A new event each time instead of clear(): a waiter that is woken looks at the groups, and
        # must not find the event that woke it.
        self._changed.set()
        self._changed = asyncio.Event()

    def _fill(self) -> None:
        """Start episodes until every slot is in use or staleness allows no more."""
        while self._running.may_start and len(self._running) < self._runner.num_slots:
            # The version that all engines serve, and not the newest: weights may be on their way to
            # other hosts, and an episode is as old as the weights that act in it.
            episode = self._records.next_episode(self._runner.weight_version)
            if episode is None:
                return
            self._running.start_episode(episode.episode_id, self._run_episode(episode))

    async def _run_episode(self, episode: EpisodeSpec) -> None:
        """Run one episode and start the next.

        A cancelled episode stays in flight: it is run after a resume.
        """
        try:
            # The scheduler sets no timer: the runner counts from the lease, so that waiting for an
            # environment is not part of it.
            trajectory = await self._runner.run_episode(
                episode, timeout_s=self._config.episode_timeout_s
            )
            self._finish(trajectory)
        except EpisodeLost as loss:
            # a lost process is no fault of the episode; an error of the agent would come back
            if self._attempts.allow(loss):
                self._run_again(loss)
            elif self._running.fails_the_run(loss):
                raise
        except Exception as error:
            if self._running.fails_the_run(error):
                raise
        self._fill()

    def _finish(self, trajectory: Trajectory) -> None:
        """Record a finished episode and, with the last member, its group."""
        self._running.remove_ended(trajectory.episode.episode_id)
        self._attempts.forget_episode(trajectory.episode.episode_id)
        # Before metrics and callbacks, which may raise: the episode is in its group then, and the
        # ledger balances.
        group = self._records.groups.finish(trajectory)
        self._metrics.count_episode(trajectory)
        if self._on_episode is not None:
            self._on_episode(trajectory)
        note_progress("episodes")
        if group is None:
            return
        is_kept = self._filter.is_kept(group)
        self._metrics.count_group(kept=is_kept)
        if is_kept and has_references(group):
            self._arrays.begin_fetch(group)
        elif is_kept:
            self._records.handover.add_group(group)
        else:
            for member in group.trajectories:
                self._runner.drop_arrays(member)
            self._records.remove_filtered(group)
            # A filter that no group passes is seen only here: its episodes run and end as they
            # should.
            self._filter.require_some_kept(self._records.staleness.next_update)
        self._wake()

    def _run_again(self, loss: EpisodeLost) -> None:
        """Run the same episode again, before any newer one."""
        self._metrics.count_lost(loss.kind)
        self._running.remove_ended(loss.episode.episode_id)
        self._records.queue_again(loss.episode)


class ArrayFetches:
    """Brings the arrays of kept groups from the hosts on which their episodes ran.

    Args:
        runner: knows the hosts.
        records: gets the groups whose arrays are here, and the members to run again.
        running: owns the tasks.
        metrics: counts the losses.
        on_end: called when a group is here, or members of it were lost.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        records: EpisodeRecords,
        running: RunningEpisodes,
        metrics: RolloutMetrics,
        on_end: Callable[[], None],
    ) -> None:
        self._runner, self._records, self._running = runner, records, running
        self._metrics, self._on_end = metrics, on_end

    def resume_fetches(self) -> None:
        """Continue with members whose arrays are on other hosts, after a resume.

        Those whose host is gone, or was started again, are run again.
        """
        for member in self._records.groups.stored_members():
            # A host that was started again has lost its episode store, whatever its name says.
            if not self._runner.holds_arrays(member):
                self._records.groups.queue_lost(member.episode)
        for group in self._records.groups.complete_with_references():
            self.begin_fetch(group)

    def begin_fetch(self, group: Group) -> None:
        """Bring the arrays of a kept group here in a task of its own, and hand the group over."""
        name = f"arrays of group {group.group_id}"
        self._running.start_extra(name, self._fetch(group))

    async def _fetch(self, group: Group) -> None:
        """Bring the arrays of a kept group here, and hand it over.

        Members whose host is gone are run again.
        """
        metadata = [member for member in group.trajectories if member.episode_ref is not None]
        found = await asyncio.gather(
            *(self._runner.materialise(member) for member in metadata), return_exceptions=True
        )
        complete: Group | None = None
        for member, result in zip(metadata, found, strict=True):
            if isinstance(result, EpisodeLost):
                self._metrics.count_lost(result.kind)
                self._records.queue_lost(member.episode)
            elif isinstance(result, BaseException):
                if isinstance(result, Exception) and not self._running.fails_the_run(result):
                    return
                raise result
            else:
                complete = self._records.groups.finish(result)
        # Another member of the group may have been lost while this one came: then its next attempt
        # completes the group.
        if complete is not None and all(each.episode_ref is None for each in complete.trajectories):
            self._records.handover.add_group(complete)
        self._on_end()
