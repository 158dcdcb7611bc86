"""A pool of simulator processes for episodes, which replaces its own failed processes.

    lease(episode) ──► Assignment ──► PooledEnv ──► LeasedEnv ──► back to Assignment
                                      │ its process died, froze, reached its episodes or its memory limit
                                      └──► its task replaces the process ──► back to Assignment

One task for each process, in the pool's own task group, starts it and replaces it. A
lease whose process dies raises `ActorDied`, so that the scheduler runs the episode again;
everything else is handled inside the pool. A process that reached a limit keeps running until its
successor is up, and is replaced between two episodes.

    who waits           for                      woken by
    `lease`             a free environment       the end of another lease, or a process that is up
    a process's task    `owner.changed`          a death, a limit, the last lease of a retired process
    `__aenter__`        `_all_up`                the task of the last process, or the pool's failure

    who waits           for                      woken by
    `lease`             a free environment       the end of another lease, or a process that is up
    a process's task    `owner.changed`          a death, a limit, the last lease of a retired process
    `__aenter__`        `_all_up`                the task of the last process, or the pool's failure
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from vla_rl.actors import Runtime, waiting
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.handle import LeasedEnv
from vla_rl.env_workers.pool_state import (
    Assignment,
    EnvState,
    PooledEnv,
    PooledProcess,
    Replacements,
)
from vla_rl.env_workers.process import RemoteEnv, SimulatorProcess, available_mb
from vla_rl.errors import ActorDied, ActorFrozen, ConfigError, EnvError
from vla_rl.types import EnvSpec, EpisodeSpec


class SimulatorPool:
    """Environments for episodes. Implements `vla_rl.types.EnvPool`.

        async with SimulatorPool(runtime, SimulatorConfig(num_envs=8)) as pool:
            async with pool.lease(episode) as env:
                observation, info = await env.reset()

    Entering starts all processes and waits until they are up. A lease waits for a free simulator;
    it prefers one that already has the episode's environment. More deaths within the window than
    the configuration allows end the pool: each waiting and later lease raises `EnvError` with the
    last of them. If the limits on open files or address space are too low for the processes,
    entering raises `ConfigError`.

    Args:
        runtime: owns the processes.
        config: number of processes, their timeouts and limits.
        name: prefix of the processes' names.
        specs: environments that will be used, as far as they are known: built once if possible, and
            shared by all forked processes (see `vla_rl.env_workers.make_env`). Others can be used
            as well.
    """

    def __init__(
        self,
        runtime: Runtime,
        config: SimulatorConfig,
        name: str = "env",
        specs: Sequence[EnvSpec] = (),
    ) -> None:
        self._runtime, self._config, self._name, self._specs = runtime, config, name, tuple(specs)
        self._processes = [
            PooledProcess(index, size)
            for index, size in enumerate(config.split_envs(config.num_envs))
        ]
        self._assignment: Assignment[PooledEnv, asyncio.Future[PooledEnv]] = Assignment(
            patience=2 * config.num_envs
        )
        self._replacements = Replacements(config)
        self._leniency = config.make_leniency()
        self._starting = asyncio.Semaphore(config.concurrent_starts)
        self._group = asyncio.TaskGroup()
        self._replacers: list[asyncio.Task[None]] = []
        self._failure: Exception | None = None
        self._indices_up: set[int] = set()
        self._all_up = asyncio.Event()
        self._num_leases = 0
        self._wait_s = 0.0

    async def __aenter__(self) -> Self:
        self._config.require_limits(len(self._processes))
        await self._group.__aenter__()
        self._replacers = [
            self._group.create_task(
                self._run_process(each), name=f"replacer of {self._name}-{each.index}"
            )
            for each in self._processes
        ]
        try:
            await self._all_up.wait()
            self._raise_failure()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._fail_waiters(
            RuntimeError(f"the pool of simulators {self._name!r} is closed; open another one.")
        )
        for task in self._replacers:
            task.cancel()
        if isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)
        else:  # an error of the body is raised unchanged, not as part of a group
            await self._group.__aexit__(None, None, None)

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        return self._config.num_envs

    @property
    def pids(self) -> list[int]:
        """Process ids of the simulator processes that are up now."""
        return [each.process.pid for each in self._processes if each.process is not None]

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, and the processes' current memory.

        Keys read like paths.
        """
        sizes = [each.process.private_mb() for each in self._processes if each.process is not None]
        return {
            "simulation/leases": float(self._num_leases),
            "simulation/lease_wait_s": self._wait_s,
            "simulation/waiting": float(self._assignment.num_waiting),
            "simulation/idle": float(self._assignment.num_idle),
            "simulation/private_mb_mean": sum(sizes) / len(sizes) if sizes else 0.0,
            "simulation/private_mb_max": max(sizes, default=0.0),
            **self._replacements.metrics(),
        }

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[LeasedEnv]:
        """Lease an environment for this episode; leaving the context frees it, whatever its state.

        Raises: EnvError if the environment cannot be built, or if more simulators died than the
        configuration allows.
        """
        pooled, env = await self._open_env(episode)
        # whatever the episode did, the environment goes back: a lease that leaked would make the pool
        # smaller for the rest of the run, and the last one would stop it without an error
        try:
            yield env
        finally:
            env.end_lease()
            env.process.num_episodes += 1
            self._release(pooled, env.process)

    async def _open_env(self, episode: EpisodeSpec) -> tuple[PooledEnv, LeasedEnv]:
        """Take an environment and have it built.

        Skip a process that has died since its last use.
        """
        while True:
            pooled, remote = await self._acquire(episode)
            try:
                if remote.process.is_alive():
                    return pooled, LeasedEnv(remote, episode, await remote.open(episode.env))
            except ActorDied:
                # the process records its death; the episode has not begun, so another process can
                # run it
                pass
            except BaseException:
                self._release(pooled, remote.process)
                raise
            self._release(pooled, remote.process)

    async def _acquire(self, episode: EpisodeSpec) -> tuple[PooledEnv, RemoteEnv]:
        began = asyncio.get_running_loop().time()
        while True:
            self._raise_failure()
            pooled = await self._wait_for_turn(episode)
            if (remote := pooled.remote) is not None:
                break
            # its process left while it was idle, or in this very turn of the loop
            pooled.state = EnvState.STARTING
        remote.process.num_leases += 1
        self._num_leases += 1
        self._wait_s += asyncio.get_running_loop().time() - began
        return pooled, remote

    async def _wait_for_turn(self, episode: EpisodeSpec) -> PooledEnv:
        """Wait for this episode's turn; return its environment, with or without a process."""
        future: asyncio.Future[PooledEnv] = asyncio.get_running_loop().create_future()
        pooled = self._assignment.request_env(future, episode.env)
        if pooled is not None:
            pooled.state = EnvState.LEASED
            return pooled
        try:
            with waiting(f"episode {episode.episode_id}", on=f"a free simulator of {self._name!r}"):
                return await future
        except asyncio.CancelledError:
            self._assignment.withdraw(future)
            # it was given an environment in this very turn: another episode must get that one
            if future.done() and not future.cancelled() and future.exception() is None:
                self._offer(future.result())
            raise

    def _release(self, env: PooledEnv, process: SimulatorProcess) -> None:
        """Free an environment after a lease of this process, and check whether the process can still be
        used.
        """
        process.num_leases -= 1
        if process is env.owner.process:
            self._check_process(env.owner, process)
        else:
            env.owner.changed.set()  # the process leaves, and this may have been its last lease
        self._offer(env)

    def _check_process(self, owner: PooledProcess, process: SimulatorProcess) -> None:
        """Have a process replaced if it must be.

        One that only reached a limit runs on meanwhile, if memory allows.
        """
        if (cause := self._replacements.find_cause(process)) is None:
            return
        if not process.is_alive():
            death = process.death
            assert death is not None, "a process that is not alive has ended in some way"
            self._count_death(cause, death)
            owner.retire()
        else:
            if not owner.must_replace:
                self._replacements.mark_expired(process, cause)
            if not _has_room_for_two(process):
                owner.retire()
        owner.must_replace = True
        owner.changed.set()

    def _offer(self, env: PooledEnv) -> None:
        """Free an environment for the next episode; one without a process waits for the next one."""
        if (remote := env.remote) is None:
            env.state = EnvState.STARTING
            return
        while (future := self._assignment.offer_env(env, remote.held)) is not None:
            if not future.done():  # its lease was cancelled in this very turn of the loop
                env.state = EnvState.LEASED
                future.set_result(env)
                return
        env.state = EnvState.IDLE

    async def _run_process(self, owner: PooledProcess) -> None:
        """Start a process and replace it on request, until cancelled or too many died."""
        try:
            if not await self._bring_up(owner):
                return
            self._indices_up.add(owner.index)
            if len(self._indices_up) == len(self._processes):
                self._all_up.set()
            while True:
                await owner.changed.wait()
                owner.changed.clear()
                await owner.stop_retired()
                if owner.must_replace and not owner.retired and not await self._bring_up(owner):
                    return
        finally:
            await owner.stop_all()

    async def _bring_up(self, owner: PooledProcess) -> bool:
        """Start the next process, with the environments of the last one.

        Return False if the pool has ended.
        """
        process = await self._start(owner)
        if process is None:
            return False
        owner.set_process(process)
        for env in owner.envs:
            if env.state is EnvState.STARTING:
                self._offer(env)
        return True

    async def _start(self, owner: PooledProcess) -> SimulatorProcess | None:
        """Start a process; return None if the pool has ended."""
        num_envs = len(owner.envs)
        while self._failure is None:
            name = owner.next_name(self._name)
            try:
                async with self._starting:
                    process = await SimulatorProcess.start(
                        self._runtime,
                        name,
                        self._config,
                        owner.index,
                        self._specs,
                        num_envs=num_envs,
                        leniency=self._leniency,
                    )
            except ActorDied as death:
                self._count_death("frozen" if isinstance(death, ActorFrozen) else "died", death)
                continue
            except (ConfigError, EnvError) as error:  # another process would fail the same way
                self._fail_waiters(error)
                return None
            await owner.open_held(process)
            return process
        return None

    def _count_death(self, cause: str, death: ActorDied) -> None:
        """Count a death against the budget.

        Beyond the budget end the pool: each waiting and later lease then raises.
        """
        if self._replacements.record_death(cause, death, asyncio.get_running_loop().time()):
            return
        config = self._config
        self._fail_waiters(
            EnvError(
                f"more than {config.max_restarts} simulators of {self._name!r} died within "
                f"{config.restart_window_s:g} s, the limit set by max_restarts; the last one: "
                f"{death}"
            ),
            cause=death,
        )

    def _fail_waiters(self, error: Exception, cause: ActorDied | None = None) -> None:
        """Raise `error` in each waiting and later lease; the first error stays."""
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


def _has_room_for_two(process: SimulatorProcess) -> bool:
    """Return whether a second process of this size can be started before this one is stopped."""
    return available_mb() > 2 * process.private_mb()
