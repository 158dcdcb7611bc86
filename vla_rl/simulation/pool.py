"""A pool of simulator processes that episodes lease, and that keeps itself whole.

    lease(episode) ──► Assignment ──► seat ──► LeasedEnv ──► back to Assignment
                                       │ died, froze, had its time, grew too big
                                       └──► its keeper replaces the process ──► back to Assignment

One keeper task for each seat, in the pool's own task group, starts the process and replaces it. A lease that meets a dead
process raises `ActorDied`, so that the scheduler plays the episode again; everything else happens behind the scenes.
"""

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from vla_rl.actors import Runtime, waiting
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.simulation.assignment import Assignment
from vla_rl.simulation.config import SimulatorConfig
from vla_rl.simulation.handle import EnvHandle
from vla_rl.simulation.lease import LeasedEnv
from vla_rl.simulation.process import SimulatorProcess
from vla_rl.simulation.restarts import RestartBudget
from vla_rl.types import EpisodeSpec

logger = logging.getLogger(__name__)

_CAUSES = ("died", "frozen", "max_episodes", "max_rss")


class _Seat:
    """A place for one process, and its keeper's cue."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.process: SimulatorProcess | None = None
        self.replace = asyncio.Event()


class SimulatorPool:
    """Environments for episodes. Implements `vla_rl.types.EnvPool`.

        async with SimulatorPool(runtime, SimulatorConfig(num_envs=8)) as pool:
            async with pool.lease(episode) as env:
                observation, info = await env.reset()

    Entering starts all processes and waits until they are up. A lease waits for a free one; it prefers one that holds the
    episode's environment already. More deaths in a short time than the config puts down to chance end the pool: every
    waiting and later lease raises `EnvError` with the last of them.

    Args:
        runtime: owns the processes.
        config: how many, their timeouts and limits.
        name: prefix of the processes' names.
    """

    def __init__(self, runtime: Runtime, config: SimulatorConfig, name: str = "env") -> None:
        self._runtime, self._config, self._name = runtime, config, name
        self._seats = [_Seat(index) for index in range(config.num_envs)]
        self._assignment: Assignment[_Seat, asyncio.Future[_Seat]] = Assignment(patience=2 * config.num_envs)
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self._starting = asyncio.Semaphore(config.concurrent_starts)
        self._group = asyncio.TaskGroup()
        self._keepers: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._seats_up: set[int] = set()
        self._all_up = asyncio.Event()
        self._num_leases = 0
        self._wait_s = 0.0
        self._replaced: Counter[str] = Counter(dict.fromkeys(_CAUSES, 0))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._keepers = [
            self._group.create_task(self._keep(seat), name=f"keeper of {self._name}-{seat.index}")
            for seat in self._seats
        ]
        try:
            await self._all_up.wait()
            self._raise_failure()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turn_away(RuntimeError(f"the pool of simulators {self._name!r} is closed; open another one."))
        for keeper in self._keepers:
            keeper.cancel()
        if isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)
        else:  # an error of the body is raised as it is, not as part of a group
            await self._group.__aexit__(None, None, None)

    @property
    def num_envs(self) -> int:
        """How many episodes can play at the same time."""
        return self._config.num_envs

    @property
    def pids(self) -> list[int]:
        """The simulator processes that are up now."""
        return [seat.process.pid for seat in self._seats if seat.process is not None]

    def metrics(self) -> dict[str, float]:
        """Counts since the start, and the processes' memory now; keys read like paths."""
        sizes = [seat.process.rss_mb() for seat in self._seats if seat.process is not None]
        replaced = {f"simulation/replaced/{cause}": float(count) for cause, count in self._replaced.items()}
        return {
            "simulation/leases": float(self._num_leases),
            "simulation/lease_wait_s": self._wait_s,
            "simulation/waiting": float(self._assignment.num_waiting),
            "simulation/idle": float(self._assignment.num_idle),
            "simulation/rss_mb_mean": sum(sizes) / len(sizes) if sizes else 0.0,
            "simulation/rss_mb_max": max(sizes, default=0.0),
            **replaced,
        }

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[LeasedEnv]:
        """An environment for this episode; leaving the context frees it, whatever state it is in.

        Raises: EnvError where the environment cannot be built, or where simulators die one after the other.
        """
        seat, process, handle = await self._open_seat(episode)
        env = LeasedEnv(handle, episode)
        try:
            yield env
        finally:
            env.end()
            process.num_episodes += 1
            self._give_back(seat, process)

    async def _open_seat(self, episode: EpisodeSpec) -> tuple[_Seat, SimulatorProcess, EnvHandle]:
        """A seat whose process has the environment ready; one that died while nobody looked is passed by."""
        while True:
            seat, process = await self._take_seat(episode)
            try:
                if process.is_alive():
                    description = await process.open(episode.env)
                    return seat, process, EnvHandle(process, episode.env, description)
            except ActorDied:
                pass  # the process remembers its death; nothing of the episode has happened yet, so another one may do
            except BaseException:
                self._give_back(seat, process)
                raise
            self._give_back(seat, process)

    async def _take_seat(self, episode: EpisodeSpec) -> tuple[_Seat, SimulatorProcess]:
        self._raise_failure()
        loop = asyncio.get_running_loop()
        began = loop.time()
        future: asyncio.Future[_Seat] = loop.create_future()
        seat = self._assignment.ask(future, episode.env)
        if seat is None:
            try:
                with waiting(f"episode {episode.episode_id}", on=f"a free simulator of {self._name!r}"):
                    seat = await future
            except asyncio.CancelledError:
                self._assignment.withdraw(future)
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._offer(future.result())
                raise
        self._num_leases += 1
        self._wait_s += loop.time() - began
        if seat.process is None:  # the pool was closed between the offer and this turn of the loop
            self._raise_failure()
        assert seat.process is not None
        return seat, seat.process

    def _give_back(self, seat: _Seat, process: SimulatorProcess) -> None:
        """Free a seat after a lease, or have its process replaced."""
        if seat.process is not process:
            return  # the pool was closed in the meantime
        cause = self._worn_out(process)
        if cause is None:
            self._offer(seat)
            return
        self._replaced[cause] += 1
        if not process.is_alive():
            self._spend_restart(process.death or ActorDied(process.name, process.pid, "it died while it was idle"))
        seat.replace.set()

    def _worn_out(self, process: SimulatorProcess) -> str | None:
        """Why the process must be replaced; None where it is good for another episode."""
        config = self._config
        if not process.is_alive():
            return "frozen" if isinstance(process.death, ActorFrozen) else "died"
        if config.max_episodes is not None and process.num_episodes >= config.max_episodes:
            return "max_episodes"
        if config.max_rss_mb is not None and process.rss_mb() > config.max_rss_mb:
            return "max_rss"
        return None

    def _offer(self, seat: _Seat) -> None:
        assert seat.process is not None
        while (future := self._assignment.offer(seat, seat.process.held)) is not None:
            if not future.done():  # its lease was cancelled in this very turn of the loop
                future.set_result(seat)
                return

    async def _keep(self, seat: _Seat) -> None:
        """Start the seat's process and replace it on its cue, until cancelled or until too many died."""
        for incarnation in itertools.count():
            if self._failure is not None:
                return
            name = f"{self._name}-{seat.index}" + (f".{incarnation}" if incarnation else "")
            try:
                async with self._starting:
                    process = await SimulatorProcess.start(self._runtime, name, self._config, seat.index)
            except ActorDied as death:
                self._replaced["died"] += 1
                self._spend_restart(death)
                continue
            try:
                seat.process = process
                seat.replace.clear()
                self._offer(seat)
                self._note_up(seat)
                await seat.replace.wait()
            finally:
                seat.process = None
                await process.stop()

    def _note_up(self, seat: _Seat) -> None:
        self._seats_up.add(seat.index)
        if len(self._seats_up) == len(self._seats):
            self._all_up.set()

    def _spend_restart(self, death: ActorDied) -> None:
        """Put a death down to chance, or end the pool: then every lease that waits or comes raises."""
        logger.warning("a simulator is replaced: %s", death)
        if self._budget.spend(asyncio.get_running_loop().time()):
            return
        config = self._config
        self._turn_away(
            EnvError(
                f"more than {config.max_restarts} simulators of {self._name!r} died within {config.restart_window_s:g} s, "
                f"too many for chance; the last one: {death}"
            ),
            cause=death,
        )

    def _turn_away(self, error: Exception, cause: ActorDied | None = None) -> None:
        """Have every waiting and later lease raise `error`; the first reason stays."""
        error.__cause__ = cause
        self._failure = self._failure or error
        self._all_up.set()
        for future in self._assignment.withdraw_all():
            if not future.done():
                future.set_exception(self._failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
