"""The caches of images beside the learner's ranks, from a group's end to its update.

    stores of other hosts ── encrypted, one connection each ──► ImageCache ── memory, by path ──► ranks of its host
    caches of other hosts that learn ── spans that ranks need here ──┘

The control process hears where an array lies, and never has the array. If all ranks are here, one
cache has all images; if they are on several hosts, each of those has one.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

import msgspec
import numpy as np

from vla_rl.actors import Actor, ChildProcess, Runtime, actor_method
from vla_rl.errors import ActorDied, RankFailed
from vla_rl.remote_rollout.image_links import (
    ArrayLayout,
    CanReadImages,
    ImageMemory,
    ImageReceiver,
    ImageReply,
    ImageRequest,
    ImagesMissing,
    ImageSource,
)
from vla_rl.types import ArrayRef
from vla_rl.types.observation import KEY_BYTES
from vla_rl.util.tasks import finish_despite_cancellation

if TYPE_CHECKING:  # they import torch, which the process of a cache does not need
    from vla_rl.learner.distributed.rank_hosts import RankAssignments
    from vla_rl.remote_rollout.rollout_host import RolloutHost


class FetchedImages(msgspec.Struct, frozen=True, kw_only=True):
    """The observations of an episode in an image cache, or why they are not there."""

    path: str = ""
    """Path of the memory that holds them, in the image cache's host."""

    layout: tuple[ArrayLayout, ...] = ()
    num_bytes: int = 0
    is_found: bool = True
    """Whether they are there. If not, the image cache is full, the host does not have them, or:"""

    fault: str = ""
    """Fault of the connection; empty if it works."""

    def arrays(self, key: int, host: str = "") -> dict[str, ArrayRef]:
        """Return what stands for each array, by its place in the episode with this key.

        Args:
            key: of the episode.
            host: the image cache's host.
        """
        return {
            each.path: ArrayRef(
                host, self.path, key, KEY_BYTES + each.start, each.dtype, each.shape
            )
            for each in self.layout
        }


class CopiedImages(msgspec.Struct, frozen=True, kw_only=True):
    """Images of other image caches, in the order in which they were wanted."""

    path: str
    key: int
    """Key of the memory that holds them."""

    def find_copies(self, host: str, arrays: Sequence[ArrayRef]) -> dict[ArrayRef, ArrayRef]:
        """Return the copy of each array in the image cache of `host`; `arrays` are in their order."""
        start, found = KEY_BYTES, {}
        for each in arrays:
            found[each] = ArrayRef(host, self.path, self.key, start, each.dtype, each.shape)
            start += each.num_bytes
        return found


class ImageCache(Actor):
    """Holds the large observations of episodes, at most `max_bytes` of them.

    Images that are copied are not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._receivers: dict[str, ImageReceiver] = {}
        self._held: dict[int, ImageMemory] = {}
        self._copied: dict[int, ImageMemory] = {}

    @actor_method(concurrent=True)
    async def connect_host(self, name: str, source: ImageSource) -> str:
        """Connect to a host that makes images; return what is wrong, empty if nothing is.

        Args:
            name: its name, for `fetch`.
            source: handle of what it has.
        """
        return await self._connect(name, source)

    @actor_method(concurrent=True)
    async def connect_cache(self, name: str, cache: "ImageCache") -> str:
        """Connect to the image cache of a host, for `copy_images`: as `connect_host`."""
        return await self._connect(name, cache)

    async def _connect(self, name: str, source: CanReadImages) -> str:
        before, receiver = self._receivers.get(name), ImageReceiver(source)
        self._receivers[name] = receiver
        if before is not None:
            before.close()
        try:
            await receiver.connect()
        except ConnectionError as error:
            return str(error)
        return ""

    @actor_method(concurrent=True)
    async def read_images(self, wanted: ImageRequest) -> ImageReply | None:
        """Return spans of the images of an episode; None if they are not here."""
        memory = self._held.get(wanted.key)
        return None if memory is None else ImageReply(memory.read_spans(wanted.spans))

    @actor_method(concurrent=True)
    async def ping(self) -> None:
        """Return at once, so that a call tells whether there is a connection."""

    @actor_method(concurrent=True)
    async def fetch(self, name: str, key: int, num_bytes: int, dropped: list[int]) -> FetchedImages:
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
            return FetchedImages(is_found=False)
        # at once: others are fetched meanwhile
        self._num_bytes += num_bytes
        kept = 0
        try:
            sent = await self._receivers[name].request_images(ImageRequest(key))
            memory = await _write_memory(key, [sent.data])
            self._held[key], kept = memory, memory.num_bytes
        except ImagesMissing:
            return FetchedImages(is_found=False)
        except ConnectionError as error:
            return FetchedImages(is_found=False, fault=str(error))
        finally:
            self._num_bytes += kept - num_bytes
        return FetchedImages(path=memory.path, layout=sent.layout, num_bytes=kept)

    @actor_method(concurrent=True)
    async def copy_images(self, name: str, wanted: list[ImageRequest]) -> CopiedImages:
        """Copy images of another image cache here, end to end, until `release_images`.

        Raises: ConnectionError if that image cache is lost; OSError if it has dropped them.
        """
        receiver = self._receivers[name]
        try:
            sent = await asyncio.gather(*(receiver.request_images(each) for each in wanted))
        except ImagesMissing:
            raise OSError(
                f"the image cache on {name} has dropped the images of an episode"
            ) from None
        key = secrets.randbits(60)
        memory = await _write_memory(key, [each.data for each in sent])
        self._copied[key] = memory
        return CopiedImages(path=memory.path, key=key)

    async def release_images(self, keys: list[int]) -> None:
        """Free images that were copied."""
        for key in keys:
            self._copied.pop(key).close()

    @actor_method(concurrent=True)
    async def make_video(
        self, images: list[ArrayRef], captions: list[tuple[str, str]], frames_per_s: float
    ) -> np.ndarray:
        """Make a video of images that are here; return its bytes, uint8 [bytes].

        Args: those of `vla_rl.reporting.encode_video`. Raises: OSError if they were dropped.
        """
        # imported here, because few runs of an image cache make videos
        from vla_rl.reporting import encode_video

        # at once: they are dropped after their update
        read = [image.read_array() for image in images]
        return await asyncio.to_thread(encode_video, read, captions, frames_per_s)

    @actor_method(concurrent=True)
    async def stay(self) -> None:
        """Return never, so that a call tells of this process's end."""
        await asyncio.Event().wait()

    async def on_stop(self) -> None:
        """Close all connections, and free the memory."""
        for receiver in self._receivers.values():
            receiver.close()
        for memory in self._copied.values():
            memory.close()
        for key in list(self._held):
            self._drop(key)

    def _drop(self, key: int) -> None:
        memory = self._held.pop(key, None)
        if memory is not None:
            self._num_bytes -= memory.num_bytes
            memory.close()


async def _write_memory(key: int, rows: Sequence[np.ndarray]) -> ImageMemory:
    """Write rows into memory; a caller that was cancelled meanwhile leaves none behind."""
    writing = asyncio.to_thread(ImageMemory, key, rows)
    memory, is_cancelled = await finish_despite_cancellation(writing)
    if is_cancelled:
        memory.close()
        raise asyncio.CancelledError
    return memory


T = TypeVar("T")

NOTICED_WITHIN_S: Final = 10.0
"""Time in which a failed call to a rank of the same host, or of one that reads, explains the loss."""


class ImageCaches:
    """The processes; open them with `async with`.

    Args:
        max_bytes: most bytes of images on each.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._runtime = max_bytes, Runtime("image caches")
        # imported here, because the process of a cache needs no torch
        from vla_rl.learner.distributed.rank_hosts import RankAssignment

        self._assignments: dict[str, RankAssignment] = {"": RankAssignment("cpu")}
        self._caches: dict[str, ImageCache] = {}

    @property
    def homes(self) -> tuple[str, ...]:
        """Names of the hosts whose image caches fetch images; empty for this one."""
        return tuple(filter(None, self._assignments)) or ("",)

    def assign(self, assignments: "RankAssignments") -> None:
        """Start an image cache on each host of these ranks. Call it before `async with`."""
        self._assignments = {each.host: each for each in assignments.by_rank}

    async def __aenter__(self) -> Self:
        """Start and connect the image caches.

        Raises: RankFailed if one is gone; OSError if one cannot be started or two connected.
        """
        await self._runtime.__aenter__()
        try:
            started = await asyncio.gather(*map(self._started, self._assignments))
            self._caches = dict(zip(self._assignments, started, strict=True))
            for name in self._assignments:
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
        """Return never. Raises: RankFailed if an image cache is gone, and with it what ranks would read."""
        stays = [asyncio.ensure_future(self.call_cache(name, _stay_up)) for name in self._caches]
        try:
            await asyncio.wait(stays, return_when=asyncio.FIRST_COMPLETED)
            # Most often its host is gone, and the error of a rank there, which comes a little later,
            # explains more.
            await asyncio.sleep(NOTICED_WITHIN_S)
            for each in stays:
                if each.done():
                    each.result()
        finally:
            for each in stays:
                each.cancel()
            await asyncio.gather(*stays, return_exceptions=True)

    async def call_cache(self, name: str, call: Callable[[ImageCache], Awaitable[T]]) -> T:
        """Call the image cache of a host. Raises: RankFailed if it is gone; else what the call raises."""
        try:
            return await call(self._caches[name])
        except ActorDied as death:
            raise _cache_lost(name, death) from death

    async def connect(self, home: str, name: str, host: "RolloutHost") -> str:
        """Connect the image cache of a host to one that makes images; return what is wrong.

        Args:
            home: the image cache's host.
            name: name of the other one.
            host: the actor there.

        Raises: ActorDied if the host is gone; RankFailed if the image cache is.
        """
        try:
            source = await host.share_images()
        except OSError as error:
            return str(error)
        return await self.call_cache(home, lambda cache: cache.connect_host(name, source))

    async def _connect_two(self, name: str, home: str) -> None:
        address = self._assignments[home].address
        shared = await self.call_cache(home, lambda cache: self._runtime.share(cache, address))
        fault = await self.call_cache(name, lambda cache: cache.connect_cache(home, shared))
        if fault:
            where = f"host {name!r}" if name else "this host"
            raise ConnectionError(f"{where} cannot fetch images from host {home!r}: {fault}")

    async def _started(self, name: str) -> ImageCache:
        try:
            return await self._runtime.spawn(
                ImageCache,
                self._max_bytes,
                name=f"{name} image cache".lstrip(),
                placement=self._assignments[name].placement or ChildProcess(),
            )
        except ActorDied as death:
            raise _cache_lost(name, death) from death


def _cache_lost(name: str, death: ActorDied) -> RankFailed:
    where = f" on host {name!r}" if name else ""
    return RankFailed(
        f"the process that holds images for the learner ranks{where} (pid {death.pid}) is gone: "
        f"{death.cause}"
    )


async def _stay_up(cache: ImageCache) -> None:
    await cache.stay()
