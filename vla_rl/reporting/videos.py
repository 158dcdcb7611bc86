"""Videos of chosen episodes: the policy's frames, with the instruction and the outcome below them.

trajectories ─► VideoChoice: first success and first failure of a task every k updates ─► VideoRecorder's thread ─► mp4
                                                            pictures on a shelf: Film there ─► its bytes ─┘
"""

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.reporting.captions import with_caption
from vla_rl.reporting.mp4 import encode_mp4
from vla_rl.reporting.outlet import FailureStreak
from vla_rl.types import Observation, ShelvedArray, Trajectory


class VideoChoice:
    """Picks the first success and the first failure of each task in every window of updates."""

    def __init__(self, every_updates: int) -> None:
        if every_updates < 1:
            raise ValueError(f"every_updates is {every_updates}, expected >= 1.")
        self._every_updates = every_updates
        self._window = -1
        self._taken: set[tuple[str, bool]] = set()

    def choose(self, update: int, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """Return the trajectories that are the first of their task and outcome in the window."""
        window = update // self._every_updates
        if window != self._window:
            self._window, self._taken = window, set()
        chosen = []
        for trajectory in trajectories:
            kind = (trajectory.episode.task, trajectory.is_success)
            if kind not in self._taken:
                self._taken.add(kind)
                chosen.append(trajectory)
        return chosen

    def give_back(self, trajectory: Trajectory) -> None:
        """Undo the choice of a trajectory that was not written.

        The window's next one of its kind replaces it.
        """
        self._taken.discard((trajectory.episode.task, trajectory.is_success))


Film: TypeAlias = Callable[
    [Sequence[ShelvedArray], Sequence[tuple[str, str]], float], "Future[NDArray[np.uint8]]"
]
"""Begins a video where its pictures are, as `filmed` makes it. Called in the event loop."""


class VideoRecorder:
    """Writes chosen trajectories in a thread of its own.

    Use as a context manager; leaving it waits for the last video.

    `offer` never waits: while `max_pending` videos are unwritten, further ones are left out and
    counted in `num_left_out`, and later episodes of their kind replace them. A video that cannot be
    written is counted in `num_failed`, the first of several in a row is reported, and a later
    episode of its kind is tried.

    Args:
        folder: the place of the videos.
        every_updates: updates of a window.
        image_key: name of the image in an observation.
        frames_per_s: decisions in a second.
        max_pending: most videos that are not written yet.
        film: makes videos of pictures that are on a shelf; None if all pictures are here.
    """

    def __init__(
        self,
        folder: Path,
        every_updates: int,
        *,
        image_key: str = "image",
        frames_per_s: float = 5.0,
        max_pending: int = 8,
        film: Film | None = None,
    ) -> None:
        self._folder, self._image_key, self._frames_per_s = folder, image_key, frames_per_s
        self._choice, self._film = VideoChoice(every_updates), film
        self._room = threading.BoundedSemaphore(max_pending)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="videos")
        self._failures = FailureStreak(
            f"writing videos to {folder}", "a later episode is tried instead"
        )
        self.num_written = self.num_left_out = 0

    @property
    def num_failed(self) -> int:
        """Videos that could not be written."""
        return self._failures.num_failed

    def __enter__(self) -> "VideoRecorder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def offer(self, update: int, trajectories: Sequence[Trajectory]) -> None:
        """Choose among `trajectories`, and queue the chosen ones for the recorder's thread."""
        for trajectory in self._choice.choose(update, trajectories):
            if not self._room.acquire(blocking=False):
                self.num_left_out += 1
                self._choice.give_back(trajectory)
                continue
            path = self._folder / video_name(update, trajectory)
            job = self._begin(path, trajectory)
            job.add_done_callback(partial(self._done, path.name, trajectory))

    def close(self) -> None:
        """Wait until every accepted video is written."""
        self._thread.shutdown(wait=True)

    def _begin(self, path: Path, trajectory: Trajectory) -> Future[None]:
        if trajectory.shelved is None or self._film is None:
            return self._thread.submit(
                write_video, path, trajectory, self._image_key, self._frames_per_s
            )
        try:
            images = images_of_video(trajectory, self._image_key)
        except ValueError as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        shelved = [image for image in images if isinstance(image, ShelvedArray)]
        # begun here and now: the pictures are dropped after the update
        film = self._film(shelved, captions_of(trajectory), self._frames_per_s)
        return self._thread.submit(_write_filmed, path, film)

    def _done(self, name: str, trajectory: Trajectory, job: Future[None]) -> None:
        self._room.release()
        error = job.exception()
        if error is None:
            self.num_written += 1
            self._failures.worked()
            return
        self._failures.failed(name, error)
        if isinstance(error, OSError):
            self._choice.give_back(trajectory)


def video_name(update: int, trajectory: Trajectory) -> str:
    """Return a file name such as `update_00012_libero_goal-3_success_episode_345.mp4`."""
    task = re.sub(r"[^A-Za-z0-9._]+", "-", trajectory.episode.task)
    outcome = "success" if trajectory.is_success else "failure"
    return f"update_{update:05d}_{task}_{outcome}_episode_{trajectory.episode.episode_id}.mp4"


def write_video(
    path: Path, trajectory: Trajectory, image_key: str = "image", frames_per_s: float = 5.0
) -> None:
    """Write one trajectory as mp4 (H.264).

    It has one frame for each decision, and the final frame for a second.

    Blocks while ffmpeg encodes; call it from a thread. `path` appears only when the file is
    complete.

    Raises: ValueError, naming the episode, if its observations have no images or change their size;
    OSError if ffmpeg cannot write.
    """
    images = (_here(image) for image in images_of_video(trajectory, image_key))
    with _appearing(path) as part:
        encode_mp4(part, captioned(images, captions_of(trajectory), frames_per_s), frames_per_s)


def filmed(
    images: Sequence[NDArray[np.uint8]], captions: Sequence[tuple[str, str]], frames_per_s: float
) -> NDArray[np.uint8]:
    """Return the bytes of a video as `write_video` writes it; blocks meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        encode_mp4(path, captioned(images, captions, frames_per_s), frames_per_s)
        return np.fromfile(path, np.uint8)


def captioned(
    images: Iterable[NDArray[np.uint8]], captions: Sequence[tuple[str, str]], frames_per_s: float
) -> Iterator[NDArray[np.uint8]]:
    """Yield each image as a frame with its two lines; the final one for a second more."""
    for number, (image, lines) in enumerate(zip(images, captions, strict=True), start=1):
        frame = with_caption(image, *lines)
        is_last = number == len(captions)
        yield from [frame] * (1 + max(1, round(frames_per_s)) if is_last else 1)


def captions_of(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return the two lines below each image of a video."""
    episode, num_steps = trajectory.episode, len(trajectory.steps)
    moments = [f"{number}/{num_steps}" for number in range(1, num_steps + 1)]
    return [
        (
            words if isinstance(words := observation.get("instruction"), str) else "",
            f"{moment}  {episode.task}  episode {episode.episode_id}",
        )
        for observation, moment in zip(
            _seen(trajectory), [*moments, trajectory.stop_reason.value], strict=True
        )
    ]


def images_of_video(
    trajectory: Trajectory, image_key: str
) -> list[NDArray[np.uint8] | ShelvedArray]:
    """Return the image of each observation, the final one included.

    Raises: ValueError, naming the episode, if one has none.
    """
    images: list[NDArray[np.uint8] | ShelvedArray] = []
    for index, observation in enumerate(_seen(trajectory)):
        image = observation.get(image_key)
        if (
            not isinstance(image, np.ndarray | ShelvedArray)
            or np.dtype(image.dtype) != np.uint8
            or image.shape[2:] != (3,)
        ):
            raise ValueError(
                f"episode {trajectory.episode.episode_id} has no uint8 [H, W, 3] {image_key!r} in "
                f"observation {index}, only {sorted(observation)}; a video needs these frames."
            )
        images.append(image)
    return images


def _seen(trajectory: Trajectory) -> list[Observation]:
    return [*(step.observation for step in trajectory.steps), trajectory.final_observation]


def _here(image: NDArray[np.uint8] | ShelvedArray) -> NDArray[np.uint8]:
    assert isinstance(image, np.ndarray), "pictures on a shelf are filmed there"
    return image


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Yield the path to write to; the file gets its name when it is complete."""
    part = path.with_suffix(".part.mp4")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_filmed(path: Path, film: Future[NDArray[np.uint8]]) -> None:
    with _appearing(path) as part:
        film.result().tofile(part)
