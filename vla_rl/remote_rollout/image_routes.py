"""The ways of images from the hosts that made them to the learner's ranks, past this process.

    group complete and kept ─► RolloutHost's store ── images ──► ImageCache beside the ranks
                                     └── tokens, log-probs, embedding ──► here, with references to the cache

A group is handed to its update once its images are in a cache: a host that is lost later costs
nothing, one that is lost before costs its episodes. Ranks that need images of another host's cache
get copies, kept from one mini-batch to the next: an update reads most images several times. If a
cache dies, the run continues from its newest checkpoint, as after the death of a rank.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Final, Self

import numpy as np

from vla_rl.errors import RankFailed
from vla_rl.learner.distributed.messages import CopiedImages
from vla_rl.learner.distributed.rank_hosts import RankAssignments
from vla_rl.remote_rollout.image_cache import FetchedImages, ImageCaches
from vla_rl.remote_rollout.image_links import ImageRequest
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.types import ArrayRef, EpisodeRef, ImageCacheRef
from vla_rl.util.tasks import await_unless


@dataclass
class _CopyBatch:
    """Copies that were copied together."""

    copies: dict[ArrayRef, ArrayRef]
    """The copy of each original."""

    num_readers: int = 1
    is_stale: bool = False
    """Whether an original was dropped, after the update that reads it."""

    @property
    def num_bytes(self) -> int:
        return sum(original.num_bytes for original in self.copies)

    def is_of(self, cached_images: ImageCacheRef) -> bool:
        episode = cached_images.host, cached_images.key
        return any((original.host, original.key) == episode for original in self.copies)


@dataclass
class _CacheCopies:
    """The copies in the image cache of one host."""

    memories: dict[int, _CopyBatch] = field(default_factory=dict)
    """Memories by key, in the order of their last use."""

    key_of: dict[ArrayRef, int] = field(default_factory=dict)
    """Key of the memory with the copy of an original."""


class ImageCopies:
    """Knows the copies on every image cache, and who reads them."""

    def __init__(self) -> None:
        self._image_caches: dict[str, _CacheCopies] = {}

    def held(
        self, host: str, images: Collection[ArrayRef]
    ) -> tuple[list[int], dict[ArrayRef, ArrayRef]]:
        """Return the copies that are in the image cache of `host`, and the keys of their memories.

        They stay until `end` is called with these keys.
        """
        cache = self._image_caches.setdefault(host, _CacheCopies())
        found = {each: cache.key_of[each] for each in images if each in cache.key_of}
        keys = list(dict.fromkeys(found.values()))
        for key in keys:
            cache.memories[key].num_readers += 1
        return keys, {each: cache.memories[key].copies[each] for each, key in found.items()}

    def add_memory(self, host: str, key: int, copies: Mapping[ArrayRef, ArrayRef]) -> None:
        """Add a memory that was copied, and is read until `end` is called with its key."""
        cache = self._image_caches.setdefault(host, _CacheCopies())
        cache.memories[key] = _CopyBatch(dict(copies))
        cache.key_of |= dict.fromkeys(copies, key)

    def end(self, host: str, keys: Collection[int], room: int) -> list[int]:
        """Note that a mini-batch was computed; return the keys of memories to free.

        Args:
            host: where it was.
            keys: memories that it read.
            room: bytes that copies may take which nothing reads at the moment.
        """
        cache = self._image_caches[host]
        for key in keys:
            memory = cache.memories.pop(key)
            memory.num_readers -= 1
            cache.memories[key] = memory
        without_readers = {
            key: each for key, each in cache.memories.items() if each.num_readers == 0
        }
        kept = sum(memory.num_bytes for memory in without_readers.values())
        freed = []
        # the stale ones first, then those that were not read for longest
        for key, memory in sorted(without_readers.items(), key=lambda each: not each[1].is_stale):
            if not memory.is_stale and kept <= room:
                break
            kept -= memory.num_bytes
            freed.append(key)
            del cache.memories[key]
            for original in memory.copies:
                if cache.key_of.get(original) == key:
                    del cache.key_of[original]
        return freed

    def drop_images(self, cached_images: ImageCacheRef) -> None:
        """Let the copies of an episode's images be freed, whose originals are dropped."""
        for cache in self._image_caches.values():
            for memory in cache.memories.values():
                memory.is_stale = memory.is_stale or memory.is_of(cached_images)


logger = logging.getLogger(__name__)

FILMED_WITHIN_S: Final = 20.0
"""Time for the last videos when a run ends."""


class ImageRoutes:
    """All ways, over the image caches of a run; open it with `async with`.

    Args:
        max_bytes: most bytes of images in an image cache; 0 without image caches: all come to this process.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._image_caches = max_bytes, ImageCaches(max_bytes)
        self._homes: tuple[str, ...] = ()
        self._routes: dict[str, ImageRoute] = {}
        self._said: set[str] = set()
        self._held: dict[str, int] = {}
        self._dropped: dict[str, list[int]] = {}
        self._image_copies = ImageCopies()
        self._videos: set[asyncio.Task[np.ndarray]] = set()

    @property
    def has_image_caches(self) -> bool:
        """Whether images go past this process."""
        return self._max_bytes > 0

    def assign(self, assignments: RankAssignments) -> None:
        """Let each host of these ranks have an image cache. Call it before `async with`."""
        self._image_caches.assign(assignments)

    async def __aenter__(self) -> Self:
        """Start the image caches, or say why images go through this process. Raises: RankFailed."""
        async with AsyncExitStack() as stack:
            try:
                if self.has_image_caches:
                    await stack.enter_async_context(self._image_caches)
            except OSError as error:
                logger.warning("images go through this process: %s", error)
            else:
                self._homes = self._image_caches.homes if self.has_image_caches else ()
            self._held = dict.fromkeys(self._homes, 0)
            self._dropped = {home: [] for home in self._homes}
            self._open = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._videos:
            await asyncio.wait(self._videos, timeout=FILMED_WITHIN_S)
        for video in self._videos:
            video.cancel()
        await self._open.__aexit__(kind, error, traceback)

    async def stay(self) -> None:
        """Return never. Raises: RankFailed if an image cache is gone."""
        if not self._homes:
            await asyncio.Event().wait()
        await self._image_caches.stay()

    async def connect_host(self, name: str, host: RolloutHost) -> "ImageRoute | None":
        """Connect the image caches to a host; None if that cannot be, with one line.

        Args:
            name: name of the host.
            host: the actor there.

        Raises: ActorDied if the host is gone; RankFailed if an image cache is.
        """
        homes = []
        for home in self._homes:
            fault = await self._image_caches.connect(home, name, host)
            if fault:
                self.say_why(name, fault)
            else:
                homes.append(home)
        if not homes:
            return None
        route = self._routes[name] = ImageRoute(self, name, homes)
        return route

    def leave(self, name: str) -> None:
        """Wait no longer for images of a host that is gone; an unknown name is ignored."""
        route = self._routes.pop(name, None)
        if route is not None:
            route.end()

    async def fetch(self, home: str, name: str, episode_ref: EpisodeRef) -> FetchedImages:
        """Put the observations of an episode in an image cache. Raises: RankFailed if the image cache is gone."""
        dropped, self._dropped[home] = self._dropped[home], []
        self._held[home] += episode_ref.num_bytes
        num_bytes = 0
        try:
            fetched = await self._image_caches.call_cache(
                home,
                lambda cache: cache.fetch(name, episode_ref.key, episode_ref.num_bytes, dropped),
            )
            num_bytes = fetched.num_bytes
        except asyncio.CancelledError:
            # the image cache may have them already, with its answer on the way
            self._dropped[home] += [*dropped, episode_ref.key]
            raise
        finally:
            self._held[home] += num_bytes - episode_ref.num_bytes
        return fetched

    def emptiest(self, homes: Collection[str]) -> str:
        """Return the one of these hosts whose image cache has least."""
        return min(homes, key=lambda home: self._held[home])

    def drop_images(self, cached_images: ImageCacheRef) -> None:
        """Let the images of an episode be dropped, with the next one that is fetched."""
        self._held[cached_images.host] -= cached_images.num_bytes
        self._dropped[cached_images.host].append(cached_images.key)
        self._image_copies.drop_images(cached_images)

    async def copy_images(self, host: str, images: Collection[ArrayRef]) -> CopiedImages:
        """Copy images of other image caches to that of a host: a `ImageCopier`.

        Those that an earlier mini-batch left there are not copied again.
        """
        keys, replaced = self._image_copies.held(host, images)
        of_home: dict[str, dict[int, list[ArrayRef]]] = {}
        for each in images:
            if each not in replaced:
                of_home.setdefault(each.host, {}).setdefault(each.key, []).append(each)
        for home, by_key in of_home.items():
            key, copied = await self._copy_to_host(host, home, by_key)
            self._image_copies.add_memory(host, key, copied)
            keys.append(key)
            replaced |= copied
        return CopiedImages(host, tuple(keys), replaced)

    async def release_images(self, copies: CopiedImages) -> None:
        """Free the copies, but for copies that have room in the image cache until their update ends."""
        room = self._max_bytes - self._held.get(copies.host, 0)
        freed = self._image_copies.end(copies.host, copies.keys, room)
        if freed:
            await self._image_caches.call_cache(
                copies.host, lambda cache: cache.release_images(freed)
            )

    async def _copy_to_host(
        self, host: str, home: str, by_key: dict[int, list[ArrayRef]]
    ) -> tuple[int, dict[ArrayRef, ArrayRef]]:
        wanted = [
            ImageRequest(key, tuple((each.start, each.start + each.num_bytes) for each in arrays))
            for key, arrays in by_key.items()
        ]
        try:
            found = await self._image_caches.call_cache(
                host, lambda cache: cache.copy_images(home, wanted)
            )
        except OSError as error:
            where = f"host {host!r}" if host else "this host"
            raise RankFailed(f"images of host {home!r} did not come to {where}: {error}") from error
        return found.key, found.find_copies(
            host, [each for arrays in by_key.values() for each in arrays]
        )

    def make_video(
        self,
        images: Sequence[ArrayRef],
        captions: Sequence[tuple[str, str]],
        frames_per_s: float,
    ) -> "Future[np.ndarray]":
        """Begin a video of images in an image cache: a `vla_rl.reporting.videos.VideoMaker`."""
        video: Future[np.ndarray] = Future()
        making = self._image_caches.call_cache(
            images[0].host,
            lambda cache: cache.make_video(list(images), list(captions), frames_per_s),
        )
        task = asyncio.create_task(making, name="video of cached images")
        self._videos.add(task)
        task.add_done_callback(partial(self._end_video, video))
        return video

    def say_why(self, name: str, fault: str) -> None:
        """Print one line about images that come here, once for each host.

        Args:
            name: the host.
            fault: of the connection to it; empty if the image caches are full.
        """
        who = name if fault else ""
        if who in self._said:
            return
        self._said.add(who)
        if fault:
            logger.warning(
                "images of host %s go through this process, because the one that holds them for "
                "the learner ranks cannot fetch them: %s; let it reach all ports of that host",
                name,
                fault,
            )
        else:
            logger.warning(
                "some images go through this process: the one that holds them for the learner "
                "ranks has its %g GiB full; raise --cluster.episode-store-gib, or lower "
                "--scheduler.max-staleness",
                self._max_bytes / (1 << 30),
            )

    def _end_video(self, video: "Future[np.ndarray]", task: "asyncio.Task[np.ndarray]") -> None:
        self._videos.discard(task)
        error = OSError("the run ended") if task.cancelled() else task.exception()
        if error is None:
            video.set_result(task.result())
        else:
            video.set_exception(error)


class ImageRoute:
    """The way of one host's images.

    Args:
        routes: all ways.
        name: name of the host.
        homes: hosts whose image caches are connected to it.
    """

    def __init__(self, routes: ImageRoutes, name: str, homes: Collection[str]) -> None:
        self._routes, self._name = routes, name
        self._homes, self._fault = list(homes), ""
        self._ended = asyncio.Event()

    async def fetch(
        self, episode_ref: EpisodeRef
    ) -> tuple[ImageCacheRef, dict[str, ArrayRef]] | None:
        """Put the observations of an episode in an image cache; return what stands for them, by place.

        None if they have to come here. Raises: RankFailed if the image cache is gone.
        """
        if not self._homes or self._ended.is_set():
            return None
        home = self._routes.emptiest(self._homes)
        # the image cache itself may notice a lost host later: a pulled cable closes no connection
        fetched = await await_unless(self._routes.fetch(home, self._name, episode_ref), self._ended)
        if fetched is None:
            return None
        if fetched.fault:
            self._fault = fetched.fault
            if home in self._homes:
                self._homes.remove(home)
        if not fetched.is_found:
            return None
        cached_images = ImageCacheRef(host=home, key=episode_ref.key, num_bytes=fetched.num_bytes)
        return cached_images, fetched.arrays(episode_ref.key, home)

    def end(self) -> None:
        """Wait no longer for images: the host is gone."""
        self._ended.set()

    def note_local(self) -> None:
        """Note that the images of an episode came here, and say why, once."""
        self._routes.say_why(self._name, self._fault)

    def drop_images(self, cached_images: ImageCacheRef) -> None:
        """Let the images of an episode be dropped."""
        self._routes.drop_images(cached_images)
