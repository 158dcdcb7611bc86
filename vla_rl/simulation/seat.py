"""A place for one simulator process of a pool, and what its keeper and its leases tell each other."""

import asyncio
import enum
import itertools

from vla_rl.simulation.process import SimulatorProcess


class Place(enum.Enum):
    """Who has a seat."""

    KEEPER = enum.auto()
    IDLE = enum.auto()
    LEASE = enum.auto()


class Seat:
    """A place for one process, and its keeper's cues."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnations = itertools.count()
        self.place = Place.KEEPER
        self.process: SimulatorProcess | None = None
        self.must_replace = asyncio.Event()
        self.successor_is_up = False
        """Whether its keeper waits for the end of the lease to let the next process serve."""
        self.came_back = asyncio.Event()
        """Set where a lease ended while the successor was waiting."""

    def put(self, process: SimulatorProcess) -> None:
        """Let this process serve from now on."""
        self.process, self.successor_is_up = process, False
        self.must_replace.clear()
        self.came_back.clear()
