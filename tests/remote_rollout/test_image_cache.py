"""Caches hold images beside the learner's ranks, and copies of those of other caches."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Self, TypeVar

import cv2
import msgspec
import numpy as np
import pytest

from vla_rl.actors import Runtime
from vla_rl.actors.remote.direct_link import make_link_keys
from vla_rl.actors.remote.shared_handles import make_shared_handle
from vla_rl.remote_rollout import image_cache
from vla_rl.remote_rollout.image_cache import FetchedImages, ImageCache, ImageCaches
from vla_rl.remote_rollout.image_links import (
    ImageMemory,
    ImageReply,
    ImageRequest,
    ImageSource,
    join_arrays,
)
from vla_rl.remote_rollout.image_routes import ImageCopies, ImageRoute, ImageRoutes
from vla_rl.types import ArrayRef, EpisodeRef, ImageCacheRef

T = TypeVar("T")

RANDOM = np.random.default_rng(0)
EPISODES = {
    key: {
        "0/observation/image": RANDOM.integers(0, 255, (64, 64, 3), np.uint8),
        "0/observation/depth": RANDOM.random((16, 16), np.float32)[::2],
        "final/image": RANDOM.integers(0, 255, (64, 64, 3), np.uint8),
    }
    for key in (7, 1 << 60)
}
NUM_BYTES = sum(array.nbytes for array in EPISODES[7].values())


def given(wanted: ImageRequest) -> ImageReply | None:
    return join_arrays(EPISODES[wanted.key]) if wanted.key in EPISODES else None


class Source:
    """Images of a host, in this loop, over a real connection."""

    def __init__(self, runtime: Runtime, actor: ImageSource) -> None:
        self.runtime, self._actor = runtime, actor

    async def shared(self) -> ImageSource:
        return await self.runtime.share(self._actor)

    async def close(self) -> None:
        await self.runtime.kill(self._actor)


@asynccontextmanager
async def cache_and_source(max_bytes: int) -> AsyncIterator[tuple[ImageCache, Source]]:
    async with Runtime("images") as runtime:
        source = Source(runtime, await runtime.spawn(ImageSource, given))
        cache = await runtime.spawn(ImageCache, max_bytes)
        assert await cache.connect_host("far", await source.shared()) == ""
        yield cache, source


def read(fetched: FetchedImages, key: int) -> dict[str, np.ndarray]:
    return {ref: array.read_array() for ref, array in fetched.arrays(key).items()}


async def test_images_are_read_from_an_image_cache_as_they_were_in_the_episode_store() -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (cache, _):
        found = await asyncio.gather(*(cache.fetch("far", key, NUM_BYTES, []) for key in EPISODES))
        for key, fetched in zip(EPISODES, found, strict=True):
            arrays = read(fetched, key)
            assert arrays.keys() == EPISODES[key].keys()
            for ref, array in arrays.items():
                expected = EPISODES[key][ref]
                assert array.dtype == expected.dtype
                assert np.array_equal(array, expected)


async def test_a_place_whose_images_were_dropped_is_not_read_as_another_episode() -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (cache, _):
        first = await cache.fetch("far", 7, NUM_BYTES, [])
        await cache.fetch("far", 99, NUM_BYTES, [7])
        with pytest.raises(FileNotFoundError):
            read(first, 7)
        second = await cache.fetch("far", 1 << 60, NUM_BYTES, [])
        assert second.path == first.path
        with pytest.raises(OSError, match="the process that held them has dropped them"):
            read(first, 7)


async def test_a_full_image_cache_takes_no_episode_until_one_is_dropped() -> None:
    async with asyncio.timeout(60), cache_and_source(NUM_BYTES + 8) as (cache, _):
        assert (await cache.fetch("far", 7, NUM_BYTES, [])).is_found
        refused = await cache.fetch("far", 1 << 60, NUM_BYTES, [])
        assert (refused.is_found, refused.fault) == (False, "")
        assert (await cache.fetch("far", 1 << 60, NUM_BYTES, [7])).is_found


async def test_an_episode_that_the_host_does_not_have_takes_no_room() -> None:
    async with asyncio.timeout(60), cache_and_source(NUM_BYTES + 8) as (cache, _):
        missing = await cache.fetch("far", 99, NUM_BYTES, [])
        assert (missing.is_found, missing.fault) == (False, "")
        assert (await cache.fetch("far", 7, NUM_BYTES, [])).is_found


async def test_a_host_that_is_lost_is_reported_at_once_and_not_asked_again() -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (cache, source):
        await source.close()
        lost = await cache.fetch("far", 7, NUM_BYTES, [])
        assert not lost.is_found
        assert "was lost" in lost.fault
        assert await cache.fetch("far", 7, NUM_BYTES, []) == lost


async def test_a_stranger_gets_no_images() -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (_, source):
        cache = ImageCache(1 << 20)
        reference = (await source.shared()).__reference__()  # type: ignore[attr-defined]
        stolen = msgspec.structs.replace(reference, keys=make_link_keys())
        assert await cache.connect_host("far", make_shared_handle(ImageSource, stolen)) != ""
        assert not (await cache.fetch("far", 7, NUM_BYTES, [])).is_found
        await cache.on_stop()


async def test_a_video_is_made_of_images_that_are_dropped_meanwhile(tmp_path) -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (cache, _):
        fetched = await cache.fetch("far", 7, NUM_BYTES, [])
        arrays = fetched.arrays(7)
        images = [arrays["0/observation/image"], arrays["final/image"]]
        filming = asyncio.create_task(
            cache.make_video(images, [("go", "1/1"), ("go", "success")], 5.0)
        )
        await asyncio.sleep(0)
        await cache.fetch("far", 99, NUM_BYTES, [7])
        (await filming).tofile(tmp_path / "video.mp4")
    video, num_frames = cv2.VideoCapture(str(tmp_path / "video.mp4")), 0
    while video.read()[0]:
        num_frames += 1
    video.release()
    assert num_frames == 1 + 1 + 5


async def test_ranks_of_another_host_copy_what_they_read_for_a_while() -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (home, source):
        other = ImageCache(0)
        assert await other.connect_cache("home", await source.runtime.share(home)) == ""
        read_there = []
        for episode in EPISODES:
            arrays = (await home.fetch("far", episode, NUM_BYTES, [])).arrays(episode, "home")
            read_there += [arrays["final/image"], arrays["0/observation/depth"]]
        spans = [(each.start, each.start + each.num_bytes) for each in read_there]
        wanted = [
            ImageRequest(episode, tuple(spans[2 * number : 2 * number + 2]))
            for number, episode in enumerate(EPISODES)
        ]
        copied = await other.copy_images("home", wanted)
        copies = copied.find_copies("other", read_there)
        for original, copy in copies.items():
            assert copy.host == "other"
            assert np.array_equal(copy.read_array(), original.read_array())
        await other.release_images([copied.key])
        with pytest.raises(FileNotFoundError):
            copies[read_there[0]].read_array()
        await home.fetch("far", 99, NUM_BYTES, [7])
        with pytest.raises(OSError, match="has dropped the images of an episode"):
            await other.copy_images("home", wanted)
        await other.on_stop()


def memories() -> list[str]:
    """Memories with images that this process has open."""
    links = (os.readlink(each.path) for each in os.scandir("/proc/self/fd") if each.is_symlink())
    return [link for link in links if "vla_rl_images" in link]


async def test_a_fetch_that_is_given_up_while_it_is_written_leaves_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, goes_on, is_written = threading.Event(), threading.Event(), threading.Event()

    class WrittenLater(ImageMemory):
        def __init__(self, key: int, rows: Sequence[np.ndarray]) -> None:
            started.set()
            assert goes_on.wait(50)
            super().__init__(key, rows)
            is_written.set()

    monkeypatch.setattr(image_cache, "ImageMemory", WrittenLater)
    async with asyncio.timeout(60), cache_and_source(NUM_BYTES + 8) as (_, source):
        cache, before = ImageCache(NUM_BYTES + 8), memories()
        assert await cache.connect_host("far", await source.shared()) == ""
        fetching = asyncio.create_task(cache.fetch("far", 7, NUM_BYTES, []))
        await asyncio.to_thread(started.wait)
        fetching.cancel()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        assert await asyncio.to_thread(is_written.wait, 50)
        assert memories() == before
        # nor does it take any room
        assert (await cache.fetch("far", 1 << 60, NUM_BYTES, [])).is_found
        await cache.on_stop()


class LocalImageCaches(ImageCaches):
    """Image caches in this process, by host, whose answers come at once or never."""

    def __init__(self, answers_come: bool, **caches: ImageCache) -> None:
        super().__init__(0)
        self._local, self.answers_come = caches, answers_come
        self.has_fetched = asyncio.Event()

    @property
    def homes(self) -> tuple[str, ...]:
        return ("home",)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *why: object) -> None:
        pass

    async def call_cache(self, name: str, call: Callable[[ImageCache], Awaitable[T]]) -> T:
        answer = await call(self._local[name])
        self.has_fetched.set()
        if not self.answers_come:
            await asyncio.Event().wait()
        return answer


async def test_images_whose_host_dies_before_they_are_reported_make_room_for_others() -> None:
    async with asyncio.timeout(60), cache_and_source(NUM_BYTES + 8) as (cache, _):
        routes, caches = ImageRoutes(NUM_BYTES + 8), LocalImageCaches(False, home=cache)
        routes._image_caches = caches
        async with routes:
            lost, stays = (ImageRoute(routes, "far", ["home"]) for _ in range(2))
            episode_refs = [
                EpisodeRef(host="far", key=key, num_bytes=NUM_BYTES) for key in EPISODES
            ]
            fetching = asyncio.create_task(lost.fetch(episode_refs[0]))
            await caches.has_fetched.wait()
            lost.end()
            assert await fetching is None
            caches.answers_come = True
            found = await stays.fetch(episode_refs[1])
            assert found is not None
            assert found[0].num_bytes == NUM_BYTES


async def test_an_image_is_copied_once_for_an_update_and_freed_after_it() -> None:
    async with asyncio.timeout(60), cache_and_source(1 << 20) as (home, source):
        other = ImageCache(1 << 20)
        assert await other.connect_cache("home", await source.runtime.share(home)) == ""
        routes = ImageRoutes(1 << 20)
        routes._image_caches = LocalImageCaches(True, home=home, other=other)
        async with routes:
            route = ImageRoute(routes, "far", ["home"])
            found = [
                await route.fetch(EpisodeRef(host="far", key=episode, num_bytes=NUM_BYTES))
                for episode in EPISODES
            ]
            (cached_images, first), (_, second) = (each for each in found if each is not None)
            images = [first["0/observation/image"], second["0/observation/image"]]
            num_before = len(memories())
            copies = await routes.copy_images("other", images[:1])
            await routes.release_images(copies)
            again = await routes.copy_images("other", images)
            await routes.release_images(again)
            # the second copies borrowed the second image alone
            assert len(memories()) == num_before + 2
            assert again.by_original[images[0]] == copies.by_original[images[0]]
            for image in images:
                assert np.array_equal(again.by_original[image].read_array(), image.read_array())
            routes.drop_images(cached_images)
            await routes.release_images(await routes.copy_images("other", images[1:]))
            assert len(memories()) == num_before + 1
            assert np.array_equal(again.by_original[images[1]].read_array(), images[1].read_array())
        await other.on_stop()


class SilentRoutes(ImageRoutes):
    """Ways over an image cache that hears nothing of a host, as behind a cable that was pulled."""

    async def fetch(self, home: str, name: str, episode_ref: EpisodeRef) -> FetchedImages:
        await asyncio.Event().wait()
        raise AssertionError

    def emptiest(self, homes: Collection[str]) -> str:
        return next(iter(homes))


async def test_images_of_a_host_that_is_gone_are_not_waited_for() -> None:
    async with asyncio.timeout(60):
        route = ImageRoute(SilentRoutes(1 << 20), "far", [""])
        episode_ref = EpisodeRef(host="far", key=7, num_bytes=NUM_BYTES)
        fetching = asyncio.create_task(route.fetch(episode_ref))
        await asyncio.sleep(0)
        assert not fetching.done()
        route.end()
        assert await fetching is None
        assert await route.fetch(episode_ref) is None


def test_the_process_of_an_image_cache_imports_no_torch() -> None:
    program = "import sys, vla_rl.remote_rollout.image_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


COPY_BYTES = 4 * 4 * 3


def image(episode: int, number: int = 0, host: str = "home") -> ArrayRef:
    return ArrayRef(host, f"memory of {episode}", episode, number * COPY_BYTES, "|u1", (4, 4, 3))


def copied(image_copies: ImageCopies, key: int, *originals: ArrayRef) -> dict[ArrayRef, ArrayRef]:
    """Add a memory in the image cache of `beside` that has copies of these."""
    copies = {each: image(key, number, "beside") for number, each in enumerate(originals)}
    image_copies.add_memory("beside", key, copies)
    return copies


def test_a_copy_that_is_there_is_found_on_its_host_alone() -> None:
    image_copies = ImageCopies()
    copies = copied(image_copies, 1, image(7), image(8))
    assert image_copies.end("beside", [1], room=1000) == []
    assert image_copies.held("beside", [image(8), image(9)]) == (
        [1],
        {image(8): copies[image(8)]},
    )
    assert image_copies.held("elsewhere", [image(8)]) == ([], {})


def test_copies_that_were_not_read_for_longest_make_room() -> None:
    image_copies = ImageCopies()
    for key in (1, 2, 3):
        copied(image_copies, key, image(key))
    assert image_copies.end("beside", [1, 2, 3], room=3 * COPY_BYTES) == []
    keys, _ = image_copies.held("beside", [image(1)])
    assert image_copies.end("beside", keys, room=2 * COPY_BYTES) == [2]
    assert image_copies.held("beside", [image(2)]) == ([], {})
    assert image_copies.held("beside", [image(3)])[0] == [3]


def test_copies_that_are_read_are_not_freed_and_take_none_of_the_room() -> None:
    image_copies = ImageCopies()
    copied(image_copies, 1, image(7))
    copied(image_copies, 2, image(8))
    keys, _ = image_copies.held("beside", [image(7)])
    assert image_copies.end("beside", [1, 2], room=COPY_BYTES) == []
    assert image_copies.end("beside", keys, room=COPY_BYTES) == [2]


def test_copies_of_an_episode_that_is_dropped_are_freed_whatever_room_there_is() -> None:
    image_copies = ImageCopies()
    copied(image_copies, 1, image(7), image(8))
    copied(image_copies, 2, image(9))
    assert image_copies.end("beside", [1], room=1000) == []
    image_copies.drop_images(ImageCacheRef(host="home", key=8, num_bytes=COPY_BYTES))
    image_copies.drop_images(ImageCacheRef(host="another", key=9, num_bytes=COPY_BYTES))
    assert image_copies.end("beside", [2], room=1000) == [1]


def test_two_copies_of_an_image_are_freed_one_by_one() -> None:
    # two ranks may have asked for it at the same time
    image_copies = ImageCopies()
    copied(image_copies, 1, image(7))
    later = copied(image_copies, 2, image(7))
    assert image_copies.end("beside", [1, 2], room=COPY_BYTES) == [1]
    assert image_copies.held("beside", [image(7)]) == ([2], later)
