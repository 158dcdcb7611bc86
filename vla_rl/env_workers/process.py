"""One simulator process, as its owner sees it: its environments, its timeouts, its memory."""

import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from vla_rl.actors import Runtime
from vla_rl.actors.processes.fork_servers import check_interpreter
from vla_rl.env_workers.checked_env import EnvDescription
from vla_rl.env_workers.config import LearnedTimeouts, Leniency, SimulatorConfig
from vla_rl.env_workers.worker import EnvWorker
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.types import EnvSpec

T = TypeVar("T")

_CGROUP = Path("/sys/fs/cgroup")

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Memory that counts as used by a control group, but that the kernel frees on demand: mostly cached
files."""


def private_mb(pid: int) -> float:
    """Return the resident memory that a process's end would free (MiB); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def holds_more_than(pid: int, limit_mb: float) -> bool:
    """Return whether a process's end would free more than `limit_mb` (MiB).

    The exact figure takes the kernel tens of milliseconds for a simulator, whose pages it counts one
    by one. Resident memory is never less and is a counter, so most questions end with it.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return pages * _PAGE_BYTES > limit_mb * 2**20 and private_mb(pid) > limit_mb


def available_mb() -> float:
    """Return the memory left for a new process (MiB).

    It is that of the machine, or less if our control group is limited.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    left = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024
    # in a container the machine's figure is not ours: a group that exceeds its limit is killed
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if (
        limit.is_file()
        and used.is_file()
        and (text := limit.read_text(encoding="utf-8").strip()) != "max"
    ):
        left = min(
            left, (int(text) - int(used.read_text(encoding="utf-8")) + _reclaimable()) / 2**20
        )
    return left


def _reclaimable() -> int:
    """Return the bytes that our control group could free at once.

    They are counted as MemAvailable counts them for the machine.
    """
    pairs = (
        line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
    )
    return sum(int(size) for name, size in pairs if name in _RECLAIMABLE)


_MAILBOX_PER_ENV = 16
"""Unanswered calls that one environment may have: enough that the environments of a process do not
wait for room in its mailbox."""


class SimulatorProcess:
    """A child process with one `EnvWorker`.

    Made by `start_process`; its owner has to await `stop` in the end.
    """

    def __init__(
        self,
        runtime: Runtime,
        worker: EnvWorker,
        name: str,
        num_envs: int,
        timeouts: LearnedTimeouts,
    ) -> None:
        self.worker = worker
        self.name = name
        self.pid = runtime.info(worker).pid
        self.num_episodes = 0
        """Number of episodes over all environments."""
        self.num_leases = 0
        """Number of environments that are leased."""
        self._death: ActorDied | None = None
        self.envs = [RemoteEnv(self, index) for index in range(num_envs)]
        self._is_stopped = False
        self._runtime, self._timeouts = runtime, timeouts
        self._env_id: str | None = None

    @classmethod
    async def start_process(
        cls,
        runtime: Runtime,
        name: str,
        config: SimulatorConfig,
        index: int = 0,
        specs: Sequence[EnvSpec] = (),
        *,
        num_envs: int = 1,
        leniency: Leniency | None = None,
    ) -> "SimulatorProcess":
        """Start a process and wait until it is up.

        Args:
            runtime, name, config: its owner, its name, its limits.
            index: its number in the pool.
            specs: environments of the pool, as far as they are known, which its fork server
                prepares.
            num_envs: number of environments in the process.
            leniency: leniency of the learned timeouts that the pool's processes share; None for a
                single process.

        Raises: ActorDied if it does not come up in time; EnvError if an environment cannot be
            prepared; ConfigError for an unusable interpreter.
        """
        await cls.prepare(runtime, config, specs)
        timeouts = LearnedTimeouts(name, leniency or config.make_leniency())
        try:
            worker = await runtime.spawn(
                EnvWorker,
                num_envs,
                name=name,
                placement=config.get_placement(index, specs),
                deadline_s=config.step_timeout_s,
                deadlines_s=dict.fromkeys(("build_env", "reset"), config.reset_timeout_s),
                limits=timeouts.by_endpoint,
                start_timeout_s=config.start_timeout_s,
                mailbox=_MAILBOX_PER_ENV * num_envs,
            )
        except TimeoutError as error:
            # a process that does not come up counts as a death, against the same budget
            raise ActorFrozen(name, 0, str(error)) from error
        return cls(runtime, worker, name, num_envs, timeouts)

    @staticmethod
    async def prepare(runtime: Runtime, config: SimulatorConfig, specs: Sequence[EnvSpec]) -> None:
        """Check the interpreter, and start the process that the others are forked from.

        Raises: see `start_process`.
        """
        # A wrong interpreter would show only as a child that exits at once, once for each attempt
        # within max_restarts.
        if config.python is not None:
            await check_interpreter(config.python, {"gymnasium": "gymnasium"})
        try:
            await runtime.prepare(config.get_placement(0, specs))
        except EnvError as error:
            if config.python is None:
                raise
            raise EnvError(
                f"in the interpreter {config.python}, which uses its own packages: {error}"
            ) from error
        # Not a death: another fork server would need as long, and the remedy is a setting of its
        # owner.
        except ActorFrozen as error:
            raise EnvError(
                f"the environments were not prepared in time: {error}; raise prepare_timeout_s if "
                "they need longer"
            ) from error

    @property
    def death(self) -> ActorDied | None:
        """How the process ended, as reported by a call or by its runtime.

        None while it is alive.
        """
        # a failed call knows it first: the runtime learns of the same death in its next turn
        return self._death or self._runtime.info(self.worker).end

    def record_exit(self, death: ActorDied) -> None:
        """Record a death that a call reported; the runtime may notice it only later."""
        self._death = death

    def record_opening(self, spec: EnvSpec) -> None:
        """Forget the durations of earlier calls if another environment is going to be built."""
        # by id and not by spec: tasks of one benchmark take about as long as each other
        if spec.id != self._env_id:
            self._env_id = spec.id
            self._timeouts.forget()

    @property
    def held(self) -> list[EnvSpec | None]:
        """Environments that are built and intact, in order."""
        return [env.held for env in self.envs]

    def is_alive(self) -> bool:
        """Return whether the process runs, as far as its runtime knows."""
        return self._death is None and self._runtime.info(self.worker).state == "running"

    def private_mb(self) -> float:
        """Return the memory of the process that is not shared (MiB); 0 if it has ended."""
        return private_mb(self.pid)

    def holds_more_than(self, limit_mb: float) -> bool:
        """Return whether `private_mb` is above a limit, usually without measuring it."""
        return holds_more_than(self.pid, limit_mb)

    async def stop(self) -> None:
        """Close the environments and end the process; one that does not answer is killed.

        Stopping again does nothing.
        """
        if self._is_stopped:
            return
        if self.is_alive():
            # An environment may have files or displays of its own to close; a stop lets it, a kill
            # does not.
            await self._runtime.stop(self.worker)
        else:
            await self._runtime.kill(self.worker)
        self._is_stopped = True  # not set if this was cancelled: the next `stop` ends the rest


class RemoteEnv:
    """Records which environment is built and intact in one slot of a process.

        with env as worker:  # an EnvError or a death in here is recorded
            answer = await worker.render(env.index)

    To keep that true, all calls of the process's worker are made so.

    Args:
        process: its process, which may have other environments too.
        index: its number there, the first argument of each call of the worker.
    """

    def __init__(self, process: SimulatorProcess, index: int) -> None:
        # The worker directly: a property in between would cost every control step another call.
        self.process, self.index, self.worker = process, index, process.worker
        self._held: EnvSpec | None = None
        self._description: EnvDescription | None = None

    def __enter__(self) -> EnvWorker:
        return self.worker

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ActorDied | EnvError):
            self.record_error(error)

    @property
    def held(self) -> EnvSpec | None:
        """The environment that is built and intact here."""
        return self._held if self.process.death is None else None

    async def build_env(self, spec: EnvSpec) -> EnvDescription:
        """Build the environment, unless it is already open; return its description."""
        if self._description is None or self.held != spec:
            self._held = None
            # Cleared before the call and not after it: if it is cancelled on the way, nobody knows
            # which environment is there.
            self.process.record_opening(spec)
            with self as worker:
                self._description = await worker.build_env(self.index, spec)
            self._held = spec
        return self._description

    async def await_recorded(self, call: Awaitable[T]) -> T:
        """Await a call of the worker whose errors are recorded.

        For calls that are awaited together with others.
        """
        with self:
            return await call

    def record_error(self, error: ActorDied | EnvError) -> None:
        """Record an error: a broken environment is built anew.

        A death is final for all environments in the process.
        """
        self._held = None
        if isinstance(error, ActorDied):
            self.process.record_exit(error)

    async def close(self) -> None:
        """Close the environment, and end the process if it has no other environment."""
        if len(self.process.envs) == 1:
            await self.process.stop()
        elif self.process.is_alive():
            self._held = None
            with self as worker:
                await worker.close_env(self.index)
