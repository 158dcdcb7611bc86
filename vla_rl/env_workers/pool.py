"""A pool of simulator processes for episodes, which replaces its own failed processes.

    lease(episode) ──► LeaseQueue ──► PooledEnv ──► LeasedEnv ──► back to LeaseQueue
                                      │ its process died, froze, reached its episodes or its memory limit
                                      └──► its task replaces the process ──► back to LeaseQueue

One task for each process, in the pool's own task group, starts it and replaces it. A
lease whose process dies raises `ActorDied`, so that the scheduler runs the episode again;
everything else is handled inside the pool. A process that reached a limit keeps running until its
successor is up, and is replaced between two episodes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from vla_rl.actors import Runtime
from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.handle import LeasedEnv
from vla_rl.env_workers.pool_state import (
    EnvState,
    LeaseQueue,
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
        self._queue = LeaseQueue(name, patience=2 * config.num_envs)
        self._replacements = Replacements(config)
        self._leniency = config.make_leniency()
        # A process that comes up keeps a core busy with imports and scenes. If all start at once,
        # each takes so long that start_timeout_s kills processes that are only slow.
        self._starting = asyncio.Semaphore(config.concurrent_starts)
        self._group = asyncio.TaskGroup()
        self._replacers: list[asyncio.Task[None]] = []
        self._indices_up: set[int] = set()
        self._all_up = asyncio.Event()
        self._num_leases = 0
        self._wait_s = 0.0

    async def __aenter__(self) -> Self:
        # The limits are checked before the first process: a process that hits a limit later fails
        # with an error of the system that names neither the limit nor the remedy.
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
            self._queue.raise_failure()
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
        self._end(
            RuntimeError(f"the pool of simulators {self._name!r} is closed; open another one.")
        )
        # Only after the waiters are failed: a task that ends gives its environments to nobody, and
        # an episode that still waits for one would wait for ever.
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
            "simulation/waiting": float(self._queue.assignment.num_waiting),
            "simulation/idle": float(self._queue.assignment.num_idle),
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
                    return pooled, LeasedEnv(remote, episode, await remote.build_env(episode.env))
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
            self._queue.raise_failure()
            pooled = await self._queue.wait_for_turn(episode)
            if (remote := pooled.remote) is not None:
                break
            # its process left while it was idle, or in this very turn of the loop
            pooled.state = EnvState.STARTING
        # The lease belongs to the process and not to its place in the pool: a successor may take
        # over while it lasts, and the old process has to stay until then.
        remote.process.num_leases += 1
        self._num_leases += 1
        self._wait_s += asyncio.get_running_loop().time() - began
        return pooled, remote

    def _release(self, env: PooledEnv, process: SimulatorProcess) -> None:
        """Free an environment after a lease of this process, and check whether the process can still be
        used.
        """
        process.num_leases -= 1
        if process is env.owner.process:
            self._check_process(env.owner, process)
        else:
            env.owner.changed.set()  # the process leaves, and this may have been its last lease
        self._queue.offer(env)

    def _check_process(self, owner: PooledProcess, process: SimulatorProcess) -> None:
        """Have a process replaced if it must be.

        One that only reached a limit runs on meanwhile, if memory allows.
        """
        if (cause := self._replacements.find_cause(process)) is None:
            return
        if not process.is_alive():
            death = process.death
            assert death is not None, "a process that is not alive has ended in some way"
            self._count_exit(cause, death)
            owner.retire()
        else:
            # Counted once: several leases of one process can end while its successor starts.
            if not owner.must_replace:
                self._replacements.mark_expired(process, cause)
            # A successor beside a process saves its set-up from the episodes, but two LIBERO
            # simulators where one fits would bring in the kernel's OOM killer, which chooses its
            # victim by size: this run.
            if not _has_room_for_two(process):
                owner.retire()
        owner.must_replace = True
        owner.changed.set()

    # who waits                    for                   woken by
    # `LeaseQueue.wait_for_turn`   a free environment    a lease that ends, a process that is up, the pool's end
    # `_run_process`               `owner.changed`       a death, a limit, the last lease of a retired process
    # `_start`                     `_starting`           another process that is up, or failed to come up
    # `__aenter__`                 `_all_up`             the task of the last process, the pool's end

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
                # The retired first: they hold the memory, and perhaps the GPU contexts, that the
                # successor needs.
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
                self._queue.offer(env)
        return True

    async def _start(self, owner: PooledProcess) -> SimulatorProcess | None:
        """Start a process; return None if the pool has ended."""
        num_envs = len(owner.envs)
        # A start that fails is tried again under a new name, so that the log tells the attempts
        # apart.
        while self._queue.failure is None:
            name = owner.next_name(self._name)
            try:
                async with self._starting:
                    process = await SimulatorProcess.start_process(
                        self._runtime,
                        name,
                        self._config,
                        owner.index,
                        self._specs,
                        num_envs=num_envs,
                        leniency=self._leniency,
                    )
            except ActorDied as death:
                self._count_exit("frozen" if isinstance(death, ActorFrozen) else "died", death)
                continue
            except (ConfigError, EnvError) as error:  # another process would fail the same way
                self._end(error)
                return None
            await owner.open_held(process)
            return process
        return None

    def _count_exit(self, cause: str, death: ActorDied) -> None:
        """Count a death against the budget.

        Beyond the budget end the pool: each waiting and later lease then raises.
        """
        if self._replacements.record_exit(cause, death, asyncio.get_running_loop().time()):
            return
        config = self._config
        self._end(
            EnvError(
                f"more than {config.max_restarts} simulators of {self._name!r} died within "
                f"{config.restart_window_s:g} s, the limit set by max_restarts; the last one: "
                f"{death}"
            ),
            cause=death,
        )

    def _end(self, error: Exception, cause: ActorDied | None = None) -> None:
        """End the pool: each waiting and later lease raises the first such error."""
        self._queue.fail_waiters(error, cause)
        # `__aenter__` may still be waiting for processes that will not come up any more
        self._all_up.set()


def _has_room_for_two(process: SimulatorProcess) -> bool:
    """Return whether a second process of this size can be started before this one is stopped."""
    return available_mb() > 2 * process.private_mb()
