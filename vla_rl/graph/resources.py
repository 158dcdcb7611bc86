"""Named resources with a capacity, such as the one device lane.

Calls that need one wait in line.
"""

import asyncio
import heapq
from types import TracebackType
from typing import Any

from vla_rl.errors import GraphError


class Resource:
    """Units that calls hold while they run.

    The oldest update goes first, then the call that arrived first.

    Belongs to one event loop. May be shared between executors, and with code outside any graph:

        async with device:
            ...

    There is no overtaking: a call that needs two units waits in line, and those behind it wait too.
    """

    def __init__(self, name: str, capacity: int = 1) -> None:
        if type(capacity) is not int or capacity < 1:
            raise GraphError(
                f"resource {name!r} has capacity {capacity!r}, expected a whole number >= 1"
            )
        self.name, self.capacity = name, capacity
        self._free = capacity
        self._waiters: list[tuple[int, int, int, asyncio.Future[Any]]] = []
        self._arrivals = 0

    @property
    def in_use(self) -> int:
        """Number of units that are held now."""
        return self.capacity - self._free

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait in line now."""
        return sum(not future.done() for *_, future in self._waiters)

    def take(self, units: int) -> bool:
        """Take units if they are free and no call waits in line; return whether they were taken."""
        # also refused while others wait: small calls would otherwise overtake one that needs several
        # units, which might then never get them together
        if self._free < units or (self._waiters and self.num_waiting):
            return False
        self._free -= units
        return True

    async def wait(self, units: int, priority: int) -> Any:
        """Wait in line for units, lower `priority` first.

        Return the `by` of the release that made room.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        heapq.heappush(self._waiters, (priority, self._arrivals, units, future))
        try:
            return await future
        except asyncio.CancelledError:
            # granted and cancelled in the same turn: pass it on
            if future.done() and not future.cancelled():
                self.release(units, by=future.result())
            else:
                self._grant(None)
            raise

    def release(self, units: int, by: object = None) -> None:
        """Give units back and wake the next calls in line."""
        self._free += units
        self._grant(by)

    def _grant(self, by: object) -> None:
        while self._waiters:
            _, _, units, future = self._waiters[0]
            if future.done():
                heapq.heappop(self._waiters)
            elif units <= self._free:
                heapq.heappop(self._waiters)
                self._free -= units
                future.set_result(by)
            else:
                return

    async def __aenter__(self) -> "Resource":
        if not self.take(1):
            await self.wait(1, priority=0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release(1)

    def __repr__(self) -> str:
        return (
            f"Resource({self.name!r}, {self.in_use} of {self.capacity} in use, "
            f"{self.num_waiting} waiting)"
        )
