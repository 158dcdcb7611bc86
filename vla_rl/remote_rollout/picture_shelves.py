"""The shelves of a run: one on each host that has learner ranks, connected to those with pictures.

all ranks here             one shelf, which has all pictures
ranks on several hosts     the shelves of the other hosts have them: hosts can connect to those
"""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self, TypeVar

from vla_rl.actors import ChildProcess, Runtime
from vla_rl.errors import ActorDied, RankFailed
from vla_rl.learner.distributed.seats import RankSeat, Seating
from vla_rl.remote_rollout.picture_shelf import PictureShelf
from vla_rl.remote_rollout.rollout_host import RolloutHost

T = TypeVar("T")

NOTICED_WITHIN_S: Final = 10.0
"""Time in which a failed call to a rank of the same host, or of one that reads, explains the loss."""


class Shelves:
    """The processes; open them with `async with`.

    Args:
        max_bytes: most bytes of pictures on each.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._runtime = max_bytes, Runtime("pictures")
        self._seats: dict[str, RankSeat] = {"": RankSeat("cpu")}
        self._shelves: dict[str, PictureShelf] = {}

    @property
    def homes(self) -> tuple[str, ...]:
        """Names of the hosts whose shelves fetch pictures; empty for this one."""
        return tuple(filter(None, self._seats)) or ("",)

    def sit(self, seating: Seating) -> None:
        """Start a shelf on each host of these ranks. Call it before `async with`."""
        self._seats = {seat.host: seat for seat in seating.seats}

    async def __aenter__(self) -> Self:
        """Start and connect the shelves.

        Raises: RankFailed if one is gone; OSError if one cannot be started or two connected.
        """
        await self._runtime.__aenter__()
        try:
            started = await asyncio.gather(*map(self._started, self._seats))
            self._shelves = dict(zip(self._seats, started, strict=True))
            for name in self._seats:
                for home in self.homes:
                    if home not in ("", name):
                        await self._connect_two(name, home)
        except BaseException:
            await self._runtime.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._runtime.__aexit__(kind, error, traceback)

    async def stay(self) -> None:
        """Return never. Raises: RankFailed if a shelf is gone, and with it what ranks would read."""
        stays = [asyncio.ensure_future(self.ask(name, _stay)) for name in self._shelves]
        try:
            await asyncio.wait(stays, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(NOTICED_WITHIN_S)
            for each in stays:
                if each.done():
                    each.result()
        finally:
            for each in stays:
                each.cancel()
            await asyncio.gather(*stays, return_exceptions=True)

    async def ask(self, name: str, call: Callable[[PictureShelf], Awaitable[T]]) -> T:
        """Call the shelf of a host. Raises: RankFailed if it is gone; else what the call raises."""
        try:
            return await call(self._shelves[name])
        except ActorDied as death:
            raise _lost(name, death) from death

    async def connect(self, home: str, name: str, host: RolloutHost, address: str) -> str:
        """Connect the shelf of a host to one that makes pictures; return what is wrong.

        Args:
            home: the shelf's host.
            name: name of the other one.
            host: the actor there.
            address: its address, without a port.

        Raises: ActorDied if the host is gone; RankFailed if the shelf is.
        """
        link_key = await self.ask(home, lambda shelf: shelf.new_link())
        try:
            door = await host.give_pictures(link_key)
        except OSError as error:
            return str(error)
        return await self.ask(home, lambda shelf: shelf.connect(name, link_key, address, door))

    async def _connect_two(self, name: str, home: str) -> None:
        link_key = await self.ask(name, lambda shelf: shelf.new_link())
        door = await self.ask(home, lambda shelf: shelf.give_pictures(link_key))
        address = self._seats[home].address
        fault = await self.ask(name, lambda shelf: shelf.connect(home, link_key, address, door))
        if fault:
            where = f"host {name!r}" if name else "this host"
            raise ConnectionError(f"{where} cannot fetch pictures from host {home!r}: {fault}")

    async def _started(self, name: str) -> PictureShelf:
        try:
            return await self._runtime.spawn(
                PictureShelf,
                self._max_bytes,
                name=f"{name} picture shelf".lstrip(),
                placement=self._seats[name].placement or ChildProcess(),
            )
        except ActorDied as death:
            raise _lost(name, death) from death


def _lost(name: str, death: ActorDied) -> RankFailed:
    where = f" on host {name!r}" if name else ""
    return RankFailed(
        f"the process that holds pictures for the learner ranks{where} (pid {death.pid}) is gone: "
        f"{death.cause}"
    )


async def _stay(shelf: PictureShelf) -> None:
    await shelf.stay()
