"""State of a pool: its processes, which of them must be replaced, which episodes wait.

Leases name the environments here, and a process that dies is replaced behind them. No class here has a
task: `SimulatorPool` drives them all.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
from collections import Counter, deque
from typing import Generic, TypeVar

from vla_rl.actors import waiting
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.process import RemoteEnv, SimulatorProcess
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.types import EnvSpec, EpisodeSpec

logger = logging.getLogger(__name__)
Env = TypeVar("Env")
Request = TypeVar("Request")


class EnvState(enum.Enum):
    """Whom a pooled environment waits for."""

    STARTING = enum.auto()
    """The next process, which the pool is starting."""

    IDLE = enum.auto()
    """An episode."""

    LEASED = enum.auto()
    """The end of its lease."""


class PooledEnv:
    """One environment of the pool, whichever process it is in at the moment.

    A lease keeps its first process, even if that process is replaced meanwhile.
    """

    def __init__(self, owner: "PooledProcess", index: int) -> None:
        self.owner, self.index = owner, index
        self.state = EnvState.STARTING

    @property
    def remote(self) -> RemoteEnv | None:
        """The environment for the next lease; None until it has a process again."""
        process = self.owner.process
        return None if process is None else process.envs[self.index]


class PooledProcess:
    """One process of the pool and its successors, and the state that its task in the pool acts on.

    A process that must be replaced stays until its successor is up, or leaves first; either way it
    is stopped after the last of its leases.
    """

    def __init__(self, index: int, num_envs: int) -> None:
        self.index = index
        self.envs = [PooledEnv(self, env) for env in range(num_envs)]
        self._incarnations = itertools.count()
        self.process: SimulatorProcess | None = None
        """Process whose environments are leased."""
        self.retired: list[SimulatorProcess] = []
        """Earlier processes that are not stopped yet."""
        self.must_replace = False
        self.changed = asyncio.Event()
        """Set when the task of this process may have something to do."""
        self._held: list[EnvSpec | None] = [None] * num_envs

    @property
    def held(self) -> list[EnvSpec | None]:
        """Environments that the process holds, in order, or held when it was retired."""
        return self._held if self.process is None else self.process.held

    def next_name(self, pool: str) -> str:
        """Return the name of the next process of a pool of this name."""
        incarnation = next(self._incarnations)
        return f"{pool}-{self.index}" + (f".{incarnation}" if incarnation else "")

    async def open_held(self, process: SimulatorProcess) -> None:
        """Open in a new process what the last one held; stop it if that is cancelled."""
        try:
            for remote, held in zip(process.envs, self.held, strict=True):
                if held is not None:
                    # the next lease reports the fault
                    with contextlib.suppress(EnvError, ActorDied):
                        await remote.build_env(held)
        except BaseException:
            await process.stop()
            raise

    def set_process(self, process: SimulatorProcess) -> None:
        """Use this process from now on."""
        self.retire()
        self.process, self.must_replace = process, False

    def retire(self) -> None:
        """Take the process out of use; it leaves after its last lease."""
        if self.process is not None:
            # its successor opens the same environments before it takes over, so that no episode waits
            # for a set-up of seconds
            self._held = self.process.held
            self.retired.append(self.process)
            self.process = None
            self.changed.set()

    async def stop_retired(self) -> None:
        """Stop the retired processes that are dead or have no lease left."""
        # also dead ones with leases: those calls have failed already, and a stop removes what is left of them
        for process in [*self.retired]:
            if process.num_leases == 0 or not process.is_alive():
                await process.stop()
                self.retired.remove(process)

    async def stop_all(self) -> None:
        """Stop all processes, even those with leases."""
        self.retire()
        for process in self.retired:
            await process.stop()


_CAUSES = ("died", "frozen", "recycle_after_episodes", "rss_limit_mb")


class Replacements:
    """Checks processes against the pool's limits, and counts the replaced ones by cause."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._config = config
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self.counts: Counter[str] = Counter(dict.fromkeys(_CAUSES, 0))

    def find_cause(self, process: SimulatorProcess) -> str | None:
        """Return why the process must be replaced; None if it can run another episode."""
        config = self._config
        if not process.is_alive():
            return "frozen" if isinstance(process.death, ActorFrozen) else "died"
        if (
            config.recycle_after_episodes is not None
            and process.num_episodes >= config.recycle_after_episodes
        ):
            return "recycle_after_episodes"
        if config.rss_limit_mb is not None and process.holds_more_than(config.rss_limit_mb):
            return "rss_limit_mb"
        return None

    def metrics(self) -> dict[str, float]:
        """Return the number of replaced processes by cause. Keys read like paths."""
        return {
            f"simulation/replaced/{cause}": float(count) for cause, count in self.counts.items()
        }

    def mark_expired(self, process: SimulatorProcess, cause: str) -> None:
        """Count a living process that reached its number of episodes or its memory limit."""
        self.counts[cause] += 1
        # In the log and not only in the metrics: it is the line from which one chooses
        # recycle_after_episodes for a simulator that leaks.
        usage = (
            f"after {process.num_episodes} episodes, with {process.private_mb():.0f} MiB of its own"
        )
        logger.info("simulator %s is replaced (%s) %s.", process.name, cause, usage)

    def record_exit(self, cause: str, death: ActorDied, now: float) -> bool:
        """Count a process that died or froze at `now` (s).

        Return False if that exceeds the budget.
        """
        self.counts[cause] += 1
        logger.warning("a simulator is replaced: %s", death)
        return self._budget.spend(now)


class RestartBudget:
    """At most `max_restarts` within any `window_s` seconds.

    Args:
        max_restarts: allowed within the window; the next one exceeds the budget.
        window_s: time for which a restart counts (s).
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._times: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Record a restart at `now` (seconds, never decreasing).

        Return False if it exceeds the budget.
        """
        self._times.append(now)
        # a window and not a total: a long run may lose many, and only many at once mean a fault
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        return len(self._times) <= self._max_restarts


class Assignment(Generic[Env, Request]):
    """Idle environments on one side, waiting requests on the other.

    At any time at least one side is empty. A process that has already built the environment of an
    episode saves its set-up, often seconds. So an episode prefers such an environment, and a free
    environment prefers such an episode; but no request is passed over more than `patience` times.

    Args:
        patience: how often the oldest request may be passed over by a younger one that fits the
            free environment.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._idle: list[tuple[Env, EnvSpec | None]] = []
        self._waiting: deque[tuple[Request, EnvSpec]] = deque()
        self._passed_over = 0

    @property
    def num_idle(self) -> int:
        """Number of environments that wait for a request."""
        return len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an environment."""
        return len(self._waiting)

    def request_env(self, request: Request, spec: EnvSpec) -> Env | None:
        """Take an environment for the request.

        It is one that holds `spec`, else an empty one, else the longest idle.

        Return None if all are busy; `offer_env` then returns the request when its turn has come.
        """
        if not self._idle:
            self._waiting.append((request, spec))
            return None
        held = [environment for _, environment in self._idle]
        wanted = spec if spec in held else None
        index = held.index(wanted) if wanted in held else 0
        return self._idle.pop(index)[0]

    def offer_env(self, env: Env, held: EnvSpec | None) -> Request | None:
        """Return the waiting request for a free environment and remove it from the list.

        None keeps the environment idle.
        """
        if not self._waiting:
            self._idle.append((env, held))
            return None
        # Without the bound, a task that is common in the run would keep all processes that hold it,
        # and an episode of a rare task would wait until the end.
        index = self._best_fit(held) if self._passed_over < self._patience else 0
        self._passed_over = 0 if index == 0 else self._passed_over + 1
        request, _ = self._waiting[index]
        del self._waiting[index]
        return request

    def withdraw(self, request: Request) -> None:
        """Remove a request that no longer waits from the list."""
        # By identity: two futures that wait are never equal, but two requests of a test, or of one
        # task, may be.
        waiting = next((entry for entry in self._waiting if entry[0] is request), None)
        if waiting is not None:
            self._waiting.remove(waiting)

    def withdraw_all(self) -> list[Request]:
        """Remove all waiting requests from the list."""
        requests = [request for request, _ in self._waiting]
        self._waiting.clear()
        return requests

    def _best_fit(self, held: EnvSpec | None) -> int:
        return next((index for index, (_, spec) in enumerate(self._waiting) if spec == held), 0)


class LeaseQueue:
    """The free environments of a pool, and the episodes that wait for one.

    Args:
        pool: name of the pool, for errors and for lists of what waits.
        patience: see `Assignment`.
    """

    def __init__(self, pool: str, patience: int) -> None:
        self._pool = pool
        self.assignment: Assignment[PooledEnv, asyncio.Future[PooledEnv]] = Assignment(patience)
        self.failure: Exception | None = None
        """Raised in each waiting and later lease; None while the pool works."""

    async def wait_for_turn(self, episode: EpisodeSpec) -> PooledEnv:
        """Wait for this episode's turn; return its environment, with or without a process."""
        future: asyncio.Future[PooledEnv] = asyncio.get_running_loop().create_future()
        pooled = self.assignment.request_env(future, episode.env)
        if pooled is not None:
            pooled.state = EnvState.LEASED
            return pooled
        try:
            with waiting(f"episode {episode.episode_id}", on=f"a free simulator of {self._pool!r}"):
                return await future
        except asyncio.CancelledError:
            self.assignment.withdraw(future)
            # it was given an environment in this very turn: another episode must get that one
            if future.done() and not future.cancelled() and future.exception() is None:
                self.offer(future.result())
            raise

    def offer(self, env: PooledEnv) -> None:
        """Free an environment for the next episode; one without a process waits for the next one."""
        if (remote := env.remote) is None:
            env.state = EnvState.STARTING
            return
        while (future := self.assignment.offer_env(env, remote.held)) is not None:
            if not future.done():  # its lease was cancelled in this very turn of the loop
                env.state = EnvState.LEASED
                future.set_result(env)
                return
        env.state = EnvState.IDLE

    def fail_waiters(self, error: Exception, cause: ActorDied | None) -> None:
        """Raise `error` in each waiting and later lease; the first error stays."""
        if cause is not None:
            error.__cause__ = cause
        self.failure = self.failure or error
        for future in self.assignment.withdraw_all():
            if not future.done():
                future.set_exception(self.failure)

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
