"""The processes and environments of a pool, each with its successors.

Leases name these, and a process that dies is replaced behind them.
"""

import asyncio
import contextlib
import enum
import itertools

from vla_rl.env_workers.process import RemoteEnv, SimulatorProcess
from vla_rl.errors import ActorDied, EnvError
from vla_rl.types import EnvSpec


class EnvState(enum.Enum):
    """Whom a pooled environment waits for."""

    STARTING = enum.auto()
    """Its keeper, which starts a process for it."""

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
    """One process of the pool and its successors, and the state that its keeper acts on.

    A process that must be replaced stays until its successor is up, or leaves first; either way it
    is stopped after the last of its leases.
    """

    def __init__(self, index: int, num_envs: int) -> None:
        self.index = index
        self.envs = [PooledEnv(self, env) for env in range(num_envs)]
        self._incarnations = itertools.count()
        self.process: SimulatorProcess | None = None
        """Process whose environments are leased."""
        self.leaving: list[SimulatorProcess] = []
        """Earlier processes that are not stopped yet."""
        self.must_replace = False
        self.news = asyncio.Event()
        """Set when the keeper may have something to do."""
        self._held: list[EnvSpec | None] = [None] * num_envs

    @property
    def held(self) -> list[EnvSpec | None]:
        """Environments that the process holds, by place, or held when it left."""
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
                        await remote.open(held)
        except BaseException:
            await process.stop()
            raise

    def put(self, process: SimulatorProcess) -> None:
        """Use this process from now on."""
        self.vacate()
        self.process, self.must_replace = process, False

    def vacate(self) -> None:
        """Take the process out of use; it leaves after its last lease."""
        if self.process is not None:
            self._held = self.process.held
            self.leaving.append(self.process)
            self.process = None
            self.news.set()

    async def dismiss(self) -> None:
        """Stop the leaving processes that are dead or have no lease left."""
        for process in [*self.leaving]:
            if process.num_leases == 0 or not process.is_alive():
                await process.stop()
                self.leaving.remove(process)

    async def clear(self) -> None:
        """Stop all processes, even those with leases."""
        self.vacate()
        for process in self.leaving:
            await process.stop()
