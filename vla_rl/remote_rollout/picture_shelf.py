"""The actor that holds pictures beside the learner's ranks, from a group's end to its update.

depots of other hosts ── encrypted, one connection each ──► PictureShelf ── memory, by path ──► ranks of its host
shelves of other hosts that learn ── spans that ranks need here ──┘

The control process hears where an array lies, and never has the array.
"""

import asyncio
import secrets
from collections.abc import Sequence

import msgspec
import numpy as np

from vla_rl.actors import Actor, KeyPair, actor_method
from vla_rl.actors.completion import finish_despite_cancellation
from vla_rl.actors.direct_link import make_link_keys
from vla_rl.remote_rollout.messages import Door
from vla_rl.remote_rollout.picture_links import (
    GivenPictures,
    PictureGiver,
    PicturesMissing,
    PictureTaker,
    PlacedArray,
    WantedPictures,
)
from vla_rl.remote_rollout.picture_memory import PictureMemory
from vla_rl.types import ShelvedArray
from vla_rl.types.shelved import KEY_BYTES


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """The observations of an episode on a shelf, or why they are not there."""

    path: str = ""
    """Path of the memory that holds them, on the shelf's host."""

    layout: tuple[PlacedArray, ...] = ()
    num_bytes: int = 0
    is_here: bool = True
    """Whether they are there. If not, the shelf is full, the host does not have them, or:"""

    fault: str = ""
    """Fault of the connection; empty if it works."""

    def arrays(self, key: int, host: str = "") -> dict[str, ShelvedArray]:
        """Return what stands for each array, by its place in the episode with this key.

        Args:
            key: of the episode.
            host: the shelf's host.
        """
        return {
            each.place: ShelvedArray(
                host, self.path, key, KEY_BYTES + each.start, each.dtype, each.shape
            )
            for each in self.layout
        }


class Borrowed(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures of other shelves, in the order in which they were wanted."""

    path: str
    key: int
    """Key of the memory that holds them."""

    def places(self, host: str, arrays: Sequence[ShelvedArray]) -> dict[ShelvedArray, ShelvedArray]:
        """Return the copy of each array on the shelf of `host`; `arrays` are in their order."""
        start, found = KEY_BYTES, {}
        for each in arrays:
            found[each] = ShelvedArray(host, self.path, self.key, start, each.dtype, each.shape)
            start += each.num_bytes
        return found


class PictureShelf(Actor):
    """Holds the large observations of episodes, at most `max_bytes` of them.

    Pictures that are borrowed are not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._keys: dict[str, KeyPair] = {}
        self._takers: dict[str, PictureTaker] = {}
        self._givers: list[PictureGiver] = []
        self._held: dict[int, PictureMemory] = {}
        self._borrowed: dict[int, PictureMemory] = {}

    async def new_link(self) -> str:
        """Return the public key with which this process will connect to a host."""
        keys = make_link_keys()
        self._keys[keys.public] = keys
        return keys.public

    async def give_pictures(self, shelf_key: str) -> Door:
        """Let the shelf with this key borrow pictures. Raises: OSError if no port is free."""
        giver = PictureGiver(shelf_key, self._find)
        self._givers.append(giver)
        return giver.door

    @actor_method(concurrent=True)
    async def connect(self, name: str, link_key: str, host: str, door: Door) -> str:
        """Connect to a host that has pictures; return what is wrong, empty if nothing is.

        Args:
            name: its name, for `fetch` and `borrow`.
            link_key: what `new_link` returned.
            host: its address, without a port.
            door: where it gives its pictures.
        """
        try:
            taker = PictureTaker(self._keys.pop(link_key), host, door)
        except ConnectionError as error:
            return f"its door cannot be used: {error}"
        before, self._takers[name] = self._takers.pop(name, None), taker
        if before is not None:
            before.close()
        try:
            await taker.connect()
        except ConnectionError as error:
            return str(error)
        return ""

    @actor_method(concurrent=True)
    async def fetch(self, name: str, key: int, num_bytes: int, dropped: list[int]) -> Fetched:
        """Fetch the observations of an episode.

        Args:
            name: the host that has them.
            key: of the episode there.
            num_bytes: most that they have.
            dropped: keys of episodes that nothing will read any more.
        """
        for each in dropped:
            self._drop(each)
        if self._num_bytes + num_bytes > self._max_bytes:
            return Fetched(is_here=False)
        # at once: others are fetched meanwhile
        self._num_bytes += num_bytes
        kept = 0
        try:
            given = await self._takers[name].take(WantedPictures(key))
            memory = await _written(key, [given.data])
            self._held[key], kept = memory, memory.num_bytes
        except PicturesMissing:
            return Fetched(is_here=False)
        except ConnectionError as error:
            return Fetched(is_here=False, fault=str(error))
        finally:
            self._num_bytes += kept - num_bytes
        return Fetched(path=memory.path, layout=given.layout, num_bytes=kept)

    @actor_method(concurrent=True)
    async def borrow(self, name: str, wanted: list[WantedPictures]) -> Borrowed:
        """Copy pictures of another shelf here, end to end, until `give_back`.

        Raises: ConnectionError if that shelf is lost; OSError if it has dropped them.
        """
        taker = self._takers[name]
        try:
            given = await asyncio.gather(*(taker.take(each) for each in wanted))
        except PicturesMissing:
            raise OSError(f"the shelf on {name} has dropped the pictures of an episode") from None
        key = secrets.randbits(60)
        memory = await _written(key, [each.data for each in given])
        self._borrowed[key] = memory
        return Borrowed(path=memory.path, key=key)

    async def give_back(self, keys: list[int]) -> None:
        """Free pictures that were borrowed."""
        for key in keys:
            self._borrowed.pop(key).close()

    @actor_method(concurrent=True)
    async def film(
        self, images: list[ShelvedArray], captions: list[tuple[str, str]], frames_per_s: float
    ) -> np.ndarray:
        """Make a video of pictures that are here; return its bytes, uint8 [bytes].

        Args: those of `vla_rl.reporting.filmed`. Raises: OSError if they were dropped.
        """
        # imported here, because few runs of a shelf make videos
        from vla_rl.reporting import filmed

        # at once: they are dropped after their update
        read = [image.read() for image in images]
        return await asyncio.to_thread(filmed, read, captions, frames_per_s)

    @actor_method(concurrent=True)
    async def stay(self) -> None:
        """Return never, so that a call tells of this process's end."""
        await asyncio.Event().wait()

    async def on_stop(self) -> None:
        """Close all connections, and free the memory."""
        for taker in self._takers.values():
            taker.close()
        for giver in self._givers:
            giver.close()
        for memory in self._borrowed.values():
            memory.close()
        for key in list(self._held):
            self._drop(key)

    def _drop(self, key: int) -> None:
        memory = self._held.pop(key, None)
        if memory is not None:
            self._num_bytes -= memory.num_bytes
            memory.close()

    def _find(self, wanted: WantedPictures) -> GivenPictures | None:
        memory = None if wanted.key is None else self._held.get(wanted.key)
        return None if memory is None else GivenPictures(memory.read(wanted.spans))


async def _written(key: int, rows: Sequence[np.ndarray]) -> PictureMemory:
    """Write rows into memory; a caller that was cancelled meanwhile leaves none behind."""
    writing = asyncio.to_thread(PictureMemory, key, rows)
    memory, is_cancelled = await finish_despite_cancellation(writing)
    if is_cancelled:
        memory.close()
        raise asyncio.CancelledError
    return memory
