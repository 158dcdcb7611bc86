"""How a run goes on after it ended, or after a rank of its learner died, froze or failed.

    run ended  ─► newest complete checkpoint, a named one, or the beginning ─► the run goes on
    rank fails ─► all ranks end ─► the run is closed in order ─► newest checkpoint ─► the run goes on

A restart is a resume in the same process: weights, optimizer, scheduler and data cursor return to
the same update, so that no episode is lost or trained on twice. If a rank cannot be started again,
because its device is gone, the next restart has one rank less, or one tensor group less, and leaves
that device out. If a whole host is gone, its GPUs are left out; ranks on CPUs move to the hosts that
are left.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from vla_rl.errors import CheckpointError, ConfigError, LearnerHostLost, RankFailed, RankNotStarted
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.learner import Checkpoint, load_checkpoint, verify_checkpoint
from vla_rl.learner.checkpoint.files import read_part
from vla_rl.learner.checkpoint.folders import (
    BEST,
    best_checkpoint,
    incomplete_checkpoints,
    list_checkpoints,
    renamed_checkpoints,
    set_incomplete_aside,
    set_newer_aside,
)
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.estimates.rank_memory import choose_gpus
from vla_rl.pipelines.config import LearningConfig
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.rollout.episode_records import SchedulerState
from vla_rl.team.members import Team, Trainable
from vla_rl.util.atomic_files import MANIFEST

if TYPE_CHECKING:
    from vla_rl.learner.distributed.rank_hosts import RankAssignments


T = TypeVar("T")

SCHEDULER: Final = "scheduler"
"""Name of the scheduler's part of a checkpoint."""


async def checkpoint_to_resume(
    run: RunDirectory, name: str | None, read: Callable[[Path], Awaitable[T]]
) -> tuple[Path, T] | None:
    """Return the checkpoint to resume from, and what `read` returns for it.

    None if the run has no checkpoint yet.

    Args:
        run: the run's directory.
        name: the checkpoint's folder, such as `update-000012`, or `best`; None for the newest
            complete one, with a printed line about each newer one that is damaged.
        read: reads a folder, such as `load_checkpoint`.

    Raises: ConfigError if there is no checkpoint `name`; CheckpointError if the named one, or every
    one, is damaged.
    """
    for folder, version in renamed_checkpoints(run.checkpoints).items():
        print(
            f"{folder} is not used: its content is of update {version}, unlike its name", flush=True
        )
    folders = list_checkpoints(run.checkpoints)
    incomplete = incomplete_checkpoints(run.checkpoints)
    if folders:
        for folder in incomplete:
            print(f"{folder} is not used: it has no {MANIFEST}, so it is not complete", flush=True)
    if name is not None:
        return await _read_named(run, name, folders, read)
    complaints = []
    for folder in reversed(folders):
        try:
            found = await read(folder)
        except CheckpointError as error:
            complaints.append(str(error))
            continue
        for complaint in complaints:
            print(f"{complaint} Resuming from the older {folder.name} instead", flush=True)
        return folder, found
    if complaints or incomplete:
        raise CheckpointError(
            f"{run.checkpoints} holds no complete checkpoint, so there is nothing to resume from: "
            + " ".join(complaints or [f"{path.name} is not complete." for path in incomplete])
        )
    return None


async def load_resumable(folder: Path) -> Checkpoint:
    """Load a checkpoint with what a resume needs first: weights, and the scheduler's state of the
    same update.

    Raises: CheckpointError if it is damaged.
    """
    checkpoint = await load_checkpoint(folder)
    state = await asyncio.to_thread(checkpoint.part, SCHEDULER, SchedulerState)
    _require_version(folder, state, checkpoint.state.weight_version)
    return checkpoint


async def verify_resumable(folder: Path) -> int:
    """Check as `load_resumable` does, without loading weights; return the weight version."""
    version = await verify_checkpoint(folder)
    _require_version(folder, await read_part(folder, SCHEDULER, SchedulerState), version)
    return version


def _require_version(folder: Path, state: SchedulerState, version: int) -> None:
    if state.version != version:
        raise CheckpointError(
            f"the scheduler's state in {folder} is of update {state.version}, expected {version} as "
            "its weights; the checkpoint is damaged."
        )


def _count_updates(run: RunDirectory) -> int:
    return len(read_metrics(run.metrics)) if run.metrics.is_file() else 0


async def set_later_aside(
    run: RunDirectory, folder: Path | None, version: int, evaluator: HeldOutEvaluator | None
) -> None:
    """Set aside checkpoints and results of later weights than `folder`'s.

    A run resumed from there makes them again.

    Prints a line about each checkpoint, or that there is none.

    Raises: CheckpointError, ConfigError if something cannot be written.
    """
    if folder is None:
        made = await asyncio.to_thread(_count_updates, run)
        found = f"no checkpoint, but made updates ({made})" if made else "no checkpoint yet"
        print(f"{run.path} has {found}: starting from its beginning", flush=True)
    else:
        for set_aside in (set_incomplete_aside, partial(set_newer_aside, folder=folder)):
            for moved in await asyncio.to_thread(set_aside, run.checkpoints):
                print(f"{moved.name.removeprefix('aside-')} is kept as {moved}", flush=True)
    if evaluator is not None:
        try:
            await asyncio.to_thread(evaluator.set_later_aside, run, version)
        except OSError as error:
            raise ConfigError(
                f"the results in {run.path} cannot be written: {error}; make room first"
            ) from error


async def _read_named(
    run: RunDirectory, name: str, folders: list[Path], read: Callable[[Path], Awaitable[T]]
) -> tuple[Path, T]:
    folder = (best_checkpoint(run.checkpoints) if name == BEST else None) or run.checkpoints / name
    if folder not in folders:
        there = ", ".join(each.name for each in folders) or "none"
        raise ConfigError(f"{run.checkpoints} has no checkpoint {name!r}; it has: {there}")
    return folder, await read(folder)


class Restarts:
    """Counts the restarts of a run, and ends it after too many without a new checkpoint.

    Args:
        max_in_a_row: number of restarts from the same checkpoint.
        num_ranks: number of ranks of each learner in the beginning.
        group_size: ranks of a tensor group; without one of them, the others have no use.
    """

    def __init__(self, max_in_a_row: int, num_ranks: int = 1, group_size: int = 1) -> None:
        self._max_in_a_row, self._num_ranks = max_in_a_row, num_ranks
        self._num_ranks_first = num_ranks
        self._assignments: RankAssignments | None = None
        self._group_size = group_size
        self._num_in_a_row, self._version = 0, -1
        self.num_restarts = 0
        """Number of restarts so far."""

        self.lost_gpus: frozenset[int] = frozenset()
        """Numbers of the GPUs here whose ranks could not be started again."""

        self.lost_devices: tuple[tuple[str, int], ...] = ()
        """The same of `cluster.learners`: names of hosts there, and their GPUs."""

        self.lost_hosts: frozenset[str] = frozenset()
        """Names of the hosts with ranks that are gone."""

    @classmethod
    def of(cls, config: LearningConfig, team: Team) -> "Restarts":
        """Return the counter of a run, none made yet."""
        learners = [member.learner or config.learner for member in team.members.values()]
        return cls(
            max(learner.max_restarts for learner in learners),
            max(learner.ranks for learner in learners),
            math.lcm(*(learner.tensor_parallel for learner in learners)),
        )

    def count(self, error: Exception, version: int) -> None:
        """Count a restart from the checkpoint of update `version`, and print a line about it.

        Raises: `error` if no rank failed; RankFailed if that is one restart too many.
        """
        failure = RankFailed.found_in(error)
        if failure is None:
            raise error
        self._num_in_a_row = self._num_in_a_row + 1 if version == self._version else 1
        self._version = version
        if self._num_in_a_row > self._max_in_a_row:
            raise RankFailed(
                f"{failure}. The run was restarted {self._max_in_a_row} times (LearnerConfig."
                f"max_restarts) without a checkpoint newer than update {version}, and ends here; "
                "look at the cause, then continue with --resume, with any number of "
                "--learner.ranks"
            ) from error
        self.num_restarts += 1
        before = self._num_ranks
        self._leave_out(failure)
        fewer = (
            ""
            if self._num_ranks == before
            else f" with {self._num_ranks} instead of {before} --learner.ranks"
        )
        print(
            f"{failure}. Restart {self._num_in_a_row} of at most {self._max_in_a_row}: the run "
            f"continues after update {version}{fewer}",
            flush=True,
        )

    def assign(self, assignments: "RankAssignments") -> None:
        """Note where the ranks are, if `cluster.learners` says so, before they start."""
        self._assignments = assignments

    def _leave_out(self, failure: RankFailed) -> None:
        """Leave out the device or the host that a failure has shown to be gone."""
        assignments, num_lost = self._assignments, 0
        if isinstance(failure, LearnerHostLost):
            self.lost_hosts |= {failure.host}
            numbers = [] if assignments is None else assignments.other_hosts.get(failure.host, [])
            # ranks on CPUs move to the hosts that are left
            num_lost = (
                sum(assignments.by_rank[rank].gpu is not None for rank in numbers)
                if assignments
                else 0
            )
        elif isinstance(failure, RankNotStarted):
            num_lost = 1
            if assignments is None:
                self.lost_gpus |= {choose_gpus(self._num_ranks, self.lost_gpus)[failure.rank]}
            else:  # with its tensor group, so that those of the others stay on one host each
                first = failure.rank - failure.rank % self._group_size
                self.lost_devices += tuple(
                    (each.host or "here", each.gpu)
                    for each in assignments.by_rank[first : first + self._group_size]
                    if each.gpu is not None
                )
        if num_lost:
            left = self._num_ranks - num_lost
            self._num_ranks = left // self._group_size * self._group_size or left

    def remaining(
        self, config: LearningConfig, model: Trainable
    ) -> tuple[LearningConfig, Trainable]:
        """Return the settings of a run, and its policies, with the ranks that are left."""
        if self.lost_hosts:
            # imported here, because one host pays nothing for what several need
            from vla_rl.cluster.run_layout import remove_hosts

            learners = remove_hosts(config.cluster.learners, self.lost_hosts)
            if not learners or self._num_ranks < 1:
                raise ConfigError(
                    f"all hosts of cluster.learners {' '.join(config.cluster.learners)!r} are gone"
                )
            cluster = msgspec.structs.replace(config.cluster, learners=learners)
            config = msgspec.structs.replace(config, cluster=cluster)
        if self._num_ranks == self._num_ranks_first:
            return config, model
        if self._num_ranks == 1 and config.cluster.learners:
            raise ConfigError(
                "one rank of cluster.learners is left, expected 2: one process learns on the host "
                "that controls the run alone"
            )
        if isinstance(model, Team):
            members = {
                name: replace(member, learner=member.learner and self._fewer(member.learner))
                for name, member in model.members.items()
            }
            model = replace(model, members=members)
        return msgspec.structs.replace(config, learner=self._fewer(config.learner)), model

    def explained(self, refused: ConfigError) -> ConfigError | RankFailed:
        """Return the error of a restart whose settings were refused."""
        if not (self.lost_gpus or self.lost_devices or self.lost_hosts):
            return refused
        failure = RankFailed(
            f"the run cannot continue with {self._num_ranks} of its ranks: {refused}; continue it "
            "with --resume on devices that fit"
        )
        failure.__cause__ = refused
        return failure

    def _fewer(self, learner: LearnerConfig) -> LearnerConfig:
        if self._num_ranks == 1:
            return msgspec.structs.replace(
                learner, ranks=1, shard="gradients", offload=False, tensor_parallel=1
            )
        # fewer ranks than one group has: each reads whole layers, if they fit
        size = 1 if self._num_ranks % learner.tensor_parallel else learner.tensor_parallel
        return msgspec.structs.replace(learner, ranks=self._num_ranks, tensor_parallel=size)
