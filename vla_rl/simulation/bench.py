"""Slots for the processes of a pool: a bench for each process, with a seat for each of its
environments.
"""

import asyncio
import enum
import itertools

from vla_rl.simulation.process import SimulatorProcess
from vla_rl.simulation.simulator import Simulator
from vla_rl.types import EnvSpec


class Place(enum.Enum):
    """Current owner of a seat."""

    KEEPER = enum.auto()
    IDLE = enum.auto()
    LEASE = enum.auto()


class Seat:
    """A place for one environment.

    A lease keeps its first simulator, even if the bench gets another process.
    """

    def __init__(self, bench: "Bench", row: int) -> None:
        self.bench, self.row = bench, row
        self.place = Place.KEEPER

    @property
    def simulator(self) -> Simulator | None:
        """Simulator for the next lease; None until the bench has a process again."""
        process = self.bench.process
        return None if process is None else process.simulators[self.row]


class Bench:
    """A place for one process, and the state that its keeper acts on.

    A process that must be replaced stays until its successor is up, or leaves first; either way it
    is stopped after the last of its leases.
    """

    def __init__(self, index: int, num_seats: int) -> None:
        self.index = index
        self.seats = [Seat(self, row) for row in range(num_seats)]
        self.incarnations = itertools.count()
        self.process: SimulatorProcess | None = None
        """Process whose environments are leased."""
        self.leaving: list[SimulatorProcess] = []
        """Earlier processes that are not stopped yet."""
        self.must_replace = False
        self.news = asyncio.Event()
        """Set when the keeper may have something to do."""
        self._held: list[EnvSpec | None] = [None] * num_seats

    @property
    def held(self) -> list[EnvSpec | None]:
        """Environments that the process holds at each seat, or held when it left."""
        return self._held if self.process is None else self.process.held

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
