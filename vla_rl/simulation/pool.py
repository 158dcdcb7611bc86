"""A pool of simulator processes that episodes lease, and that keeps itself whole.

    lease(episode) ──► Assignment ──► seat ──► LeasedEnv ──► back to Assignment
                                       │ died, froze, had its time, grew too big
                                       └──► its keeper replaces the process ──► back to Assignment

One keeper task for each seat, in the pool's own task group, starts the process and replaces it. A lease that meets a dead
process raises `ActorDied`, so that the scheduler plays the episode again; everything else happens behind the scenes. A
process that had its time or grew too big plays on until its successor is up, and is replaced between two episodes.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from vla_rl.actors import Runtime, waiting
from vla_rl.errors import ActorDied, ActorFrozen, ConfigError, EnvError
from vla_rl.simulation.assignment import Assignment
from vla_rl.simulation.config import SimulatorConfig
from vla_rl.simulation.handle import EnvHandle
from vla_rl.simulation.lease import LeasedEnv
from vla_rl.simulation.memory import available_mb
from vla_rl.simulation.process import SimulatorProcess
from vla_rl.simulation.restarts import RestartBudget
from vla_rl.simulation.seat import Place, Seat
from vla_rl.types import EnvSpec, EpisodeSpec

logger = logging.getLogger(__name__)

_CAUSES = ("died", "frozen", "recycle_after_episodes", "rss_limit_mb")


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
        specs: environments that will be played, as far as that is known: built once where they can be, and shared by all
            processes that are forked (see `vla_rl.simulation.preparation`). Others can be played as well.
    """

    def __init__(
        self, runtime: Runtime, config: SimulatorConfig, name: str = "env", specs: Sequence[EnvSpec] = ()
    ) -> None:
        self._runtime, self._config, self._name, self._specs = runtime, config, name, tuple(specs)
        self._seats = [Seat(index) for index in range(config.num_envs)]
        self._assignment: Assignment[Seat, asyncio.Future[Seat]] = Assignment(patience=2 * config.num_envs)
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
        sizes = [seat.process.private_mb() for seat in self._seats if seat.process is not None]
        replaced = {f"simulation/replaced/{cause}": float(count) for cause, count in self._replaced.items()}
        return {
            "simulation/leases": float(self._num_leases),
            "simulation/lease_wait_s": self._wait_s,
            "simulation/waiting": float(self._assignment.num_waiting),
            "simulation/idle": float(self._assignment.num_idle),
            "simulation/private_mb_mean": sum(sizes) / len(sizes) if sizes else 0.0,
            "simulation/private_mb_max": max(sizes, default=0.0),
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

    async def _open_seat(self, episode: EpisodeSpec) -> tuple[Seat, SimulatorProcess, EnvHandle]:
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

    async def _take_seat(self, episode: EpisodeSpec) -> tuple[Seat, SimulatorProcess]:
        self._raise_failure()
        loop = asyncio.get_running_loop()
        began = loop.time()
        future: asyncio.Future[Seat] = loop.create_future()
        seat = self._assignment.ask(future, episode.env)
        if seat is not None:
            seat.place = Place.LEASE
        else:
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

    def _give_back(self, seat: Seat, process: SimulatorProcess) -> None:
        """Free a seat after a lease, or have its process replaced; one that only had its time plays on meanwhile."""
        if seat.process is not process:
            return  # the pool was closed in the meantime
        cause, is_replaced = self._worn_out(process), seat.must_replace.is_set()
        if cause is not None and (not is_replaced or not process.is_alive()):
            self._note_replaced(process, cause)
        plays_on = cause is None or (process.is_alive() and _has_room_beside(process))
        if plays_on and not seat.successor_is_up:
            self._offer(seat)
        else:
            seat.place = Place.KEEPER
            seat.came_back.set()
        if cause is not None:
            seat.must_replace.set()

    def _note_replaced(self, process: SimulatorProcess, cause: str) -> None:
        self._replaced[cause] += 1
        if not process.is_alive():
            self._spend_restart(process.death or ActorDied(process.name, process.pid, "it died while it was idle"))
            return
        told = f"after {process.num_episodes} episodes, with {process.private_mb():.0f} MiB of its own"
        logger.info("simulator %s is replaced (%s) %s.", process.name, cause, told)

    def _worn_out(self, process: SimulatorProcess) -> str | None:
        """Why the process must be replaced; None where it is good for another episode."""
        config = self._config
        if not process.is_alive():
            return "frozen" if isinstance(process.death, ActorFrozen) else "died"
        if config.recycle_after_episodes is not None and process.num_episodes >= config.recycle_after_episodes:
            return "recycle_after_episodes"
        if config.rss_limit_mb is not None and process.private_mb() > config.rss_limit_mb:
            return "rss_limit_mb"
        return None

    def _offer(self, seat: Seat) -> None:
        assert seat.process is not None
        while (future := self._assignment.offer(seat, seat.process.held)) is not None:
            if not future.done():  # its lease was cancelled in this very turn of the loop
                seat.place = Place.LEASE
                future.set_result(seat)
                return
        seat.place = Place.IDLE

    async def _keep(self, seat: Seat) -> None:
        """Start the seat's process and replace it on its cue, until cancelled or until too many died."""
        try:
            if (process := await self._start(seat)) is None:
                return
            seat.put(process)
            self._offer(seat)
            self._note_up(seat)
            while await self._replace_on_cue(seat):
                pass
        finally:
            leaving, seat.process = seat.process, None
            if leaving is not None:
                await leaving.stop()

    async def _replace_on_cue(self, seat: Seat) -> bool:
        """Replace the seat's process once; False where there is nothing to replace it with, and the pool is over."""
        await seat.must_replace.wait()
        old = seat.process
        assert old is not None
        if seat.place is Place.KEEPER:
            seat.process = None
            await old.stop()
        if (successor := await self._start(seat, old.held)) is None:
            return False
        try:
            seat.successor_is_up = True
            if seat.place is Place.LEASE:
                await seat.came_back.wait()
        except BaseException:
            await successor.stop()
            raise
        seat.put(successor)
        if seat.place is Place.KEEPER:
            self._offer(seat)
        await old.stop()
        return True

    async def _start(self, seat: Seat, held: EnvSpec | None = None) -> SimulatorProcess | None:
        """The next process of the seat, with `held` built if possible; None where the pool is over."""
        while self._failure is None:
            incarnation = next(seat.incarnations)
            name = f"{self._name}-{seat.index}" + (f".{incarnation}" if incarnation else "")
            try:
                async with self._starting:
                    process = await SimulatorProcess.start(self._runtime, name, self._config, seat.index, self._specs)
            except ActorDied as death:
                self._replaced["died"] += 1
                self._spend_restart(death)
                continue
            except (ConfigError, EnvError) as error:  # no other process would do better
                self._turn_away(error)
                return None
            try:
                if held is not None:
                    with contextlib.suppress(EnvError, ActorDied):  # what is wrong with it, the next lease says
                        await process.open(held)
            except BaseException:
                await process.stop()
                raise
            return process
        return None

    def _note_up(self, seat: Seat) -> None:
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
        if cause is not None:
            error.__cause__ = cause
        self._failure = self._failure or error
        self._all_up.set()
        for future in self._assignment.withdraw_all():
            if not future.done():
                future.set_exception(self._failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _has_room_beside(process: SimulatorProcess) -> bool:
    """Whether a second process of this size can be started before this one is given up."""
    return available_mb() > 2 * process.private_mb()
