"""The processes of a sharded learner: started together, called together, ended together.

A rank that dies, freezes or raises ends all ranks, because the others would wait for it in a
collective. One error names the rank and the cause: `RankFailed` if a new start may help, else the
rank's own error, such as a ValueError about a row.
"""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from msgspec.structs import replace

from vla_rl.actors import ChildProcess, ForkServer, Runtime
from vla_rl.actors.owned_folder import OwnedFolder, sweep
from vla_rl.errors import ActorDied, RankFailed, RankNotStarted, RemoteError
from vla_rl.learning.config import CriticConfig, LearnerConfig
from vla_rl.learning.imitation_passes import Preparation
from vla_rl.learning.optimizer import DivergedError
from vla_rl.learning.rank_memory import gpus_of
from vla_rl.learning.sharded.rank import LearnerRank
from vla_rl.learning.sharded.rank_parts import PolicySource

T = TypeVar("T")

FOLDER_PREFIX: Final = "vla_rl-ranks-"
"""Beginning of the name of the folder with the policy that the ranks begin with."""

START_TIMEOUT_S: Final = 600.0
"""Longest start of a rank, in which it imports torch and the policy's code."""

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
        self._gpus = gpus_of(config.ranks, lost_gpus)
        self._has_reference = False
        self._critic: CriticConfig | None = None
        self._critic_seed = 0
        self._counts_flops = False
        self._preparation: Preparation | None = None
        self._turn = asyncio.Lock()
        self._failure: BaseException | None = None
        self._failed_rank = 0
        self._folder: OwnedFolder | None = None
        self.ranks: list[LearnerRank] = []
        """Handles of the ranks, by number; empty before `start`."""

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed, and all were ended."""
        return self._failure is not None

    @property
    def folder(self) -> Path:
        """A folder on this host that ends with the group."""
        assert self._folder is not None, "the ranks are not started; use `async with`"
        return self._folder.path

    @property
    def policy_folder(self) -> Path:
        """The policy as the ranks began with it."""
        return self.folder / "policy"

    def hold_reference(self) -> None:
        """Let every rank also score with the first weights. Call it before `start`."""
        self._require_not_started("a reference")
        self._has_reference = True

    def hold_critic(self, config: CriticConfig, seed: int) -> None:
        """Let every rank also hold its part of a critic. Call it before `start`."""
        self._require_not_started("a critic")
        self._critic, self._critic_seed = config, seed

    def prepare_by(self, preparation: Preparation) -> None:
        """Let every rank make its batches of supervised learning so. Call it before `start`."""
        self._require_not_started("a preparation")
        self._preparation = preparation

    def count_flops(self) -> None:
        """Let every rank count the arithmetic of its passes. Call it before `start`."""
        self._require_not_started("counts")
        self._counts_flops = True

    def dealt(self, parts: Sequence[T]) -> Iterator[tuple[LearnerRank, T]]:
        """Yield each rank with its part; the ranks of a tensor group have the same one."""
        size = self._config.tensor_parallel
        return ((rank, parts[number // size]) for number, rank in enumerate(self.ranks))

    def counted(self, found: Sequence[T]) -> Sequence[T]:
        """Return the results of all ranks, once for each tensor group."""
        return found[:: self._config.tensor_parallel]

    async def start(self, model: Any) -> None:
        """Start the ranks, each with its part of a policy.

        Raises: RankNotStarted if one dies or fails; else what a rank raises.
        """
        # it holds the whole policy: that of a run that was killed must not stay
        await asyncio.to_thread(sweep, FOLDER_PREFIX)
        self._folder = await asyncio.to_thread(OwnedFolder, FOLDER_PREFIX)
        try:
            await self._start(model)
        except RankFailed as failure:
            await self.close()
            raise RankNotStarted(f"at its start, {failure}", self._failed_rank) from failure
        except BaseException:
            await self.close()
            raise

    async def together(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Await calls to all ranks. The first failure ends every rank, and is raised as one error.

        One such set of calls after another: critic, reference and learner ask at the same time, and
        every rank has to make the same collectives in the same order.

        Raises: RankFailed naming the rank that died or failed; else what a rank raised.
        """
        async with self._turn:
            return await self._together(calls)

    async def _together(self, calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        if self._failure is not None:
            for call in calls:
                call.close()
            raise self._failure
        tasks = [asyncio.ensure_future(call) for call in calls]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [task.exception() for task in done]
        if not any(errors):
            return [task.result() for task in tasks]
        if not any(isinstance(error, ActorDied) for error in errors) and pending:
            # the others notice a death by their connections, before the process is known to be gone
            await asyncio.wait(pending, timeout=NAMED_WITHIN_S)
        errors = [task.exception() if _has_ended(task) else None for task in tasks]
        try:
            await self._fail(errors)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def each(self, calls: Iterable[Coroutine[Any, Any, T]]) -> None:
        """Await calls in which no rank waits for another.

        A full disk ends no rank; only a rank that is gone does. Raises: as `together`.
        """
        found = await asyncio.gather(*calls, return_exceptions=True)
        errors = [error if isinstance(error, BaseException) else None for error in found]
        if any(isinstance(error, ActorDied) for error in errors):
            await self._fail(errors)
        for error in errors:
            if error is not None:
                raise error

    async def _fail(self, errors: Sequence[BaseException | None]) -> NoReturn:
        """End all ranks, and raise the first failure; later ones only follow from it."""
        if self._failure is None:
            self._failure = self._explained(errors)
            await self._end_all()
        raise self._failure

    async def close(self) -> None:
        """End the ranks in order, and remove the folder."""
        await asyncio.gather(
            *(self._runtime.stop(rank) for rank in self.ranks), return_exceptions=True
        )
        if self._folder is not None:
            await asyncio.to_thread(self._folder.remove)
            self._folder = None

    async def _start(self, model: Any) -> None:
        source = replace(
            await asyncio.to_thread(_saved, model, self.policy_folder, self._gpus),
            has_reference=self._has_reference,
            critic=self._critic,
            critic_seed=self._critic_seed,
            counts_flops=self._counts_flops,
            preparation=self._preparation,
        )
        placement = _placement(model)
        self.ranks = await self.together(
            self._runtime.spawn(
                LearnerRank,
                rank,
                source,
                self._config,
                str(self.folder / "meeting-point"),
                name=self._names[rank],
                placement=placement,
                start_timeout_s=START_TIMEOUT_S,
            )
            for rank in range(self._config.ranks)
        )
        await self.together(rank.join() for rank in self.ranks)

    def _require_not_started(self, what: str) -> None:
        if self.ranks:
            raise RuntimeError(f"the ranks run already; ask for {what} before they start")

    def _explained(self, errors: Sequence[BaseException | None]) -> BaseException:
        """Return the error to raise; `errors` are those of the ranks, by number."""
        found = {rank: error for rank, error in enumerate(errors) if error is not None}
        died = [error for error in found.values() if isinstance(error, ActorDied)]
        if died:
            self._failed_rank = self._names.index(died[0].name)
            who = f"rank {self._failed_rank} {self._of_all} (pid {died[0].pid})"
            return _failed(f"{who} is gone: {died[0].cause}", died[0])
        own = [rank for rank, error in found.items() if not _is_of_connection(error)]
        self._failed_rank = rank = (own or list(found))[0]
        first = found[rank]
        if isinstance(first, RemoteError) and first.type_name == DivergedError.__name__:
            return DivergedError(first.message)
        if not isinstance(first, RuntimeError | OSError | MemoryError | RemoteError):
            return first  # a fault of what it was given, which a new start would meet again
        text = str(first) if isinstance(first, RemoteError) else f"{type(first).__name__}: {first}"
        return _failed(f"rank {rank} {self._of_all} failed: {text}", first)

    async def _end_all(self) -> None:
        await asyncio.gather(
            *(self._runtime.kill(rank) for rank in self.ranks), return_exceptions=True
        )


def _has_ended(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled()


def _failed(what: str, cause: BaseException) -> RankFailed:
    failure = RankFailed(f"{what}; all ranks were ended")
    failure.__cause__ = cause
    return failure


def _is_of_connection(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and "onnection" in str(error)


def _saved(model: Any, folder: Path, gpus: Sequence[int]) -> PolicySource:
    """Save a policy for the ranks; the folder lasts as long as they do."""
    model.save(folder)
    kind, network = type(model), model.network
    parameters = dict(network.named_parameters())
    first = next(iter(parameters.values()))
    return PolicySource(
        policy_class=f"{kind.__module__}:{kind.__qualname__}",
        folder=str(folder),
        dtype=str(first.dtype).removeprefix("torch."),
        trained=frozenset(name for name, each in parameters.items() if each.requires_grad),
        recomputes=getattr(model, "recomputes_activations", False),
        devices=tuple(f"cuda:{gpu}" if first.device.type == "cuda" else "cpu" for gpu in gpus),
    )


def _placement(model: object) -> ChildProcess:
    """Return where ranks run: forked from one server that has imported torch and the policy."""
    # loopback only: neither gloo nor NCCL encrypts, and ranks are on this host
    env = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # AdamW imports torch._dynamo when it is made, a second of each rank's start
    imports = ("vla_rl.learning.sharded.rank", type(model).__module__, "torch._dynamo")
    return ChildProcess(env=env, fork_from=ForkServer(imports=imports, env=env))
