"""The processes of a sharded learner: started together, called together, ended together.

A rank that dies, freezes or raises ends all ranks, because the others would wait for it in a
collective. One error names the rank and the cause: `RankFailed` if a new start may help, else the
rank's own error, such as a ValueError about a row.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from msgspec.structs import replace
from torch import Tensor

from vla_rl.actors import Runtime
from vla_rl.errors import ActorDied, RankFailed, RankNotStarted, RemoteError
from vla_rl.learner.config import CriticConfig, LearnerConfig, MicroBatchSize
from vla_rl.learner.distributed.messages import ImageCopier, with_local_images
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.rank_hosts import (
    NeededBytes,
    OtherHosts,
    RankAssignments,
    RankStarter,
    assign_local_ranks,
    measure_clock_offset,
    save_policy,
)
from vla_rl.learner.imitation_backend import Preparation
from vla_rl.learner.optimizer import DivergedError
from vla_rl.learner.plan import plan_passes
from vla_rl.types import Observation
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.tasks import await_end

S = TypeVar("S")
T = TypeVar("T")

FOLDER_PREFIX: Final = "vla_rl-ranks-"
"""Beginning of the name of the folder with the policy that the ranks begin with."""

NAMED_WITHIN_S: Final = 1.5
"""Time in which a dead rank is found after another one complained about its connection."""


class RankGroup:
    """The ranks of one learner.

    Args:
        runtime: starts the ranks.
        config: number of ranks, and their settings.
        member: name of the policy in a team of several; "" in a team of one.
        lost_gpus: numbers of the GPUs that no rank may use.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: LearnerConfig,
        member: str = "",
        lost_gpus: Collection[int] = (),
    ) -> None:
        self._runtime, self._config = runtime, config
        self._of_all = f"of {config.ranks}" + (f" of {member!r}" if member else "")
        self._names = [f"{member} rank {rank}".lstrip() for rank in range(config.ranks)]
        self._lost_gpus = lost_gpus
        self._assignments: RankAssignments | None = None
        self.clock_offsets_s: list[float] = []
        """Seconds to add to each rank's times, to have them on this host's clock."""

        self.image_copier: ImageCopier | None = None
        """Copies images to the hosts of the ranks that read them; None if all are there."""

        self._has_reference = False
        self._critic: CriticConfig | None = None
        self._critic_seed = 0
        self._counts_flops = False
        self._preparation: Preparation | None = None
        self.turn = asyncio.Lock()
        """Held while the ranks compute something together, or send their weights to a host."""

        self._failure: BaseException | None = None
        self._failed_rank = 0
        self._folder: OwnedFolder | None = None
        self.ranks: list[LearnerRank] = []
        """Handles of the ranks, by number; empty before `start_ranks`."""

    @property
    def folder(self) -> Path:
        """A folder on this host that ends with the group."""
        assert self._folder is not None, "the ranks are not started; use `async with`"
        return self._folder.path

    @property
    def policy_folder(self) -> Path:
        """The policy as the ranks began with it."""
        return self.folder / "policy"

    @property
    def assignments(self) -> RankAssignments:
        """Host and device of each rank."""
        assert self._assignments is not None, "the ranks are not started; use `async with`"
        return self._assignments

    @property
    def other_hosts(self) -> OtherHosts:
        """The other hosts of the ranks."""
        return OtherHosts(self.ranks, self.assignments)

    def set_assignments(self, assignments: RankAssignments) -> None:
        """Start the ranks there, and not all on this host. Call it before `start_ranks`."""
        self._require_not_started("other hosts")
        self._assignments = assignments

    def add_reference(self) -> None:
        """Let every rank also score with the first weights. Call it before `start_ranks`."""
        self._require_not_started("a reference")
        self._has_reference = True

    def add_critic(self, config: CriticConfig, seed: int) -> None:
        """Let every rank also hold its part of a critic. Call it before `start_ranks`."""
        self._require_not_started("a critic")
        self._critic, self._critic_seed = config, seed

    def set_preparation(self, preparation: Preparation) -> None:
        """Let every rank make its batches of supervised learning so. Call it before `start_ranks`."""
        self._require_not_started("a preparation")
        self._preparation = preparation

    def count_flops(self) -> None:
        """Let every rank count the arithmetic of its passes. Call it before `start_ranks`."""
        self._require_not_started("counts")
        self._counts_flops = True

    @property
    def makes_idle_passes(self) -> bool:
        """Whether each pass is a collective of all ranks, as with sharded weights."""
        # with gathered weights only the last pass is one
        return self._config.shard == "weights"

    def deal_rows(self, lengths: Tensor, size: MicroBatchSize) -> Sequence[Sequence[Tensor]]:
        """Return the micro-batches of each rank; the ranks of a tensor group count as one."""
        return plan_passes(lengths, size, self._config.row_groups)

    async def compute(
        self, work: Callable[[LearnerRank, S], Coroutine[Any, Any, T]], dealt: Sequence[S]
    ) -> Sequence[T]:
        """Let each rank work on its part; return the results by part.

        A cancellation is raised at its end, so that no rank waits in a collective that others left.
        """
        size = self._config.tensor_parallel
        # the ranks of a tensor group have the same part, and the same results
        found = self.together(
            work(rank, dealt[number // size]) for number, rank in enumerate(self.ranks)
        )
        return (await await_end(asyncio.ensure_future(found)))[::size]

    async def read_tensors(self, tensors: Sequence[Tensor], work: str) -> list[Tensor]:
        """Return results of passes, which came to this host."""
        return list(tensors)

    def with_local_images(
        self, rank: LearnerRank, observations: Sequence[Observation], indices: Iterable[Tensor]
    ) -> AbstractAsyncContextManager[tuple[Observation, ...]]:
        """Return observations for a rank, which will read the rows of `indices`: see `with_local_images`."""
        number = next(number for number, each in enumerate(self.ranks) if each is rank)
        return with_local_images(
            self.image_copier, self.assignments.by_rank[number].host, observations, indices
        )

    async def start_ranks(self, model: Any) -> None:
        """Start the ranks, each with its part of a policy.

        Raises: RankNotStarted if one dies or fails; else what a rank raises.
        """
        # it holds the whole policy: that of a run that was killed must not stay
        await asyncio.to_thread(remove_abandoned_folders, FOLDER_PREFIX)
        self._folder = await asyncio.to_thread(OwnedFolder, FOLDER_PREFIX)
        try:
            await self._start(model)
        except RankFailed as failure:
            await self.close()
            assignment = self.assignments.by_rank[self._failed_rank]
            raise RankNotStarted(
                f"at its start, {failure}", self._failed_rank, assignment.host
            ) from failure
        except BaseException:
            await self.close()
            raise

    async def together(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Await calls to all ranks. The first failure ends every rank, and is raised as one error.

        One such set of calls after another: critic, reference and learner ask at the same time, and
        every rank has to make the same collectives in the same order.

        Raises: RankFailed naming the rank that died or failed; else what a rank raised.
        """
        async with self.turn:
            return await self._together(calls)

    async def _together(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        if self._failure is not None:
            for call in calls:
                call.close()
            raise self._failure
        # all at once: every rank has to be in the same collective, and one that was asked later
        # would let the others wait
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in done]
        if not any(errors):
            return [task.result() for task in tasks]
        if not any(isinstance(error, ActorDied) for error in errors) and pending:
            # the others notice an exit by their connections, before the process is known to be gone
            await asyncio.wait(pending, timeout=NAMED_WITHIN_S)
        errors = [task.exception() if _has_ended(task) else None for task in tasks]
        try:
            await self._fail(errors)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def restored(
        self,
        files: Sequence[Path],
        needed: NeededBytes,
        restore: Callable[[LearnerRank, Sequence[str]], Coroutine[Any, Any, None]],
    ) -> None:
        """Let every rank read its part of some files of this host. Raises: as `together`.

        Args:
            files: safetensors files.
            needed: asks a rank which bytes it will read of them.
            restore: lets a rank read them, given their paths on its host.
        """
        hosts, numbers = self.other_hosts, range(len(self.ranks))
        found = await self.together(hosts.bring_needed(rank, files, needed) for rank in numbers)
        local_files = [str(file) for file in files]
        await self.together(
            restore(rank, paths or local_files)
            for rank, paths in zip(self.ranks, hosts.by_rank(found), strict=True)
        )
        await self.together(hosts.remove_files(rank) for rank in numbers)

    async def each(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Await calls in which no rank waits for another; return their results.

        A full disk ends no rank; only a rank that is gone does. Raises: as `together`.
        """
        # no rank waits for another here, so an error of one leaves the others' files whole
        found = await asyncio.gather(*calls, return_exceptions=True)
        errors = [error if isinstance(error, BaseException) else None for error in found]
        if any(isinstance(error, ActorDied) for error in errors):
            await self._fail(errors)
        for error in errors:
            if error is not None:
                raise error
        return [result for result in found if not isinstance(result, BaseException)]

    async def fail(self, cause: ActorDied) -> NoReturn:
        """End all ranks because one is gone. Raises: RankFailed that names it."""
        await self._fail([cause])

    async def _fail(self, errors: Sequence[BaseException | None]) -> NoReturn:
        """End all ranks, and raise the first failure; later ones only follow from it."""
        if self._failure is None:
            self._failed_rank, self._failure = _find_cause(errors, self._names, self._describe_rank)
            killing = (self._runtime.kill(rank) for rank in self.ranks)
            await asyncio.gather(*killing, return_exceptions=True)
        raise self._failure

    async def close(self) -> None:
        """End the ranks in order, and remove the folder."""
        await asyncio.gather(
            *(self._runtime.stop(rank) for rank in self.ranks), return_exceptions=True
        )
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove_folder)
            self._folder = None

    async def _start(self, model: Any) -> None:
        if self._assignments is None:
            on_gpus = next(model.network.parameters()).device.type == "cuda"
            self._assignments = assign_local_ranks(
                self._config.ranks, self._lost_gpus, on_gpus=on_gpus
            )
        # saved once and read by every rank, instead of sending the 15 GB of a 7B to each of their
        # processes
        source = replace(
            await asyncio.to_thread(save_policy, model, self.policy_folder, self._assignments),
            has_reference=self._has_reference,
            critic=self._critic,
            critic_seed=self._critic_seed,
            counts_flops=self._counts_flops,
            preparation=self._preparation,
        )
        start = RankStarter(self._runtime, self._config, self._assignments, self.folder)
        numbers = range(len(self._assignments.by_rank))
        self.ranks = await self.together(
            start.spawn_rank(rank, self._names[rank], source, model) for rank in numbers
        )
        hosts = self.other_hosts
        await self.together(hosts.require_same_code(rank, source.policy_class) for rank in numbers)
        rendezvous, *_ = await self.together(
            start.open_rendezvous(rank, self.ranks[0]) for rank in numbers
        )
        await self.together(
            start.connect_rank(rank, self.ranks[rank], rendezvous) for rank in numbers
        )
        found = await self.together(
            hosts.bring_folder(rank, self.policy_folder) for rank in numbers
        )
        await self.together(
            rank.join(folder or str(self.policy_folder))
            for rank, folder in zip(self.ranks, hosts.by_rank(found), strict=True)
        )
        # at once: a host that is killed leaves no copy of the policy on its disk
        await self.together(hosts.remove_files(rank) for rank in numbers)
        self.clock_offsets_s = await self.together(self._clock_offset_s(rank) for rank in numbers)

    async def _clock_offset_s(self, rank: int) -> float:
        return (
            await measure_clock_offset(self.ranks[rank])
            if self.other_hosts.is_on_other_host(rank)
            else 0.0
        )

    def _require_not_started(self, what: str) -> None:
        if self.ranks:
            raise RuntimeError(f"the ranks run already; ask for {what} before they start")

    def _describe_rank(self, rank: int) -> str:
        assignment = self._assignments.by_rank[rank] if self._assignments is not None else None
        return f"rank {rank} {self._of_all}{assignment.location if assignment is not None else ''}"


def _find_cause(
    errors: Sequence[BaseException | None],
    names: Sequence[str],
    describe_rank: Callable[[int], str],
) -> tuple[int, BaseException]:
    """Return the rank that failed first and the error to raise; `errors` are the ranks', by number."""
    found = {rank: error for rank, error in enumerate(errors) if error is not None}
    # a process that is gone explains everything else: the others lost their connection to it
    died = [error for error in found.values() if isinstance(error, ActorDied)]
    if died:
        rank = names.index(died[0].name)
        who = f"{describe_rank(rank)} (pid {died[0].pid})"
        return rank, _failed(f"{who} is gone: {died[0].cause}", died[0])
    # gloo tells the others `Connection closed by peer`: an error of another kind is the cause
    own = [rank for rank, error in found.items() if not _is_of_connection(error)]
    rank = (own or list(found))[0]
    first = found[rank]
    if isinstance(first, RemoteError) and first.type_name == DivergedError.__name__:
        return rank, DivergedError(first.message)
    if not isinstance(first, RuntimeError | OSError | MemoryError | RemoteError):
        return rank, first  # a fault of what it was given, which a new start would raise again
    text = str(first) if isinstance(first, RemoteError) else f"{type(first).__name__}: {first}"
    return rank, _failed(f"{describe_rank(rank)} failed: {text}", first)


def _has_ended(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled()


def _failed(what: str, cause: BaseException) -> RankFailed:
    failure = RankFailed(f"{what}; all ranks were ended")
    failure.__cause__ = cause
    return failure


def _is_of_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "onnection" in str(error)
