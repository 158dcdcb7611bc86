"""Videos of chosen episodes: the policy's frames, with the instruction and the outcome below them.

trajectories ─► VideoChoice: first success and first failure of a task every k updates ─► VideoRecorder's thread ─► mp4
"""

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vla_rl.observe.captions import with_caption
from vla_rl.observe.mp4 import encode_mp4
from vla_rl.observe.outlet import FailureStreak
from vla_rl.types import Trajectory


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


class VideoRecorder:
    """Writes chosen trajectories in a thread of its own.

    Use as a context manager; leaving it waits for the last video.

    `offer` never waits: while `max_pending` videos are unwritten, further ones are left out and
    counted in `num_left_out`, and later episodes of their kind replace them. A video that cannot be
    written is counted in `num_failed`, the first of several in a row is reported, and a later
    episode of its kind is tried.
    """

    def __init__(
        self,
        folder: Path,
        every_updates: int,
        *,
        image_key: str = "image",
        frames_per_s: float = 5.0,
        max_pending: int = 8,
    ) -> None:
        self._folder, self._image_key, self._frames_per_s = folder, image_key, frames_per_s
        self._choice = VideoChoice(every_updates)
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
            job = self._thread.submit(
                write_video, path, trajectory, self._image_key, self._frames_per_s
            )
            job.add_done_callback(partial(self._done, path.name, trajectory))

    def close(self) -> None:
        """Wait until every accepted video is written."""
        self._thread.shutdown(wait=True)

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
    part = path.with_suffix(".part.mp4")
    try:
        encode_mp4(
            part,
            _captioned_frames(trajectory, image_key, hold=max(1, round(frames_per_s))),
            frames_per_s,
        )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _captioned_frames(
    trajectory: Trajectory, image_key: str, hold: int
) -> Iterator[NDArray[np.uint8]]:
    """Yield each observation as a frame; the final one `hold` times more."""
    observations = [*(step.observation for step in trajectory.steps), trajectory.final_observation]
    episode = trajectory.episode
    for index, observation in enumerate(observations):
        image = observation.get(image_key)
        if (
            not isinstance(image, np.ndarray)
            or image.dtype != np.uint8
            or image.ndim != 3
            or image.shape[2] != 3
        ):
            raise ValueError(
                f"episode {episode.episode_id} has no uint8 [H, W, 3] {image_key!r} in observation "
                f"{index}, only {sorted(observation)}; a video needs these frames."
            )
        is_last = index == len(observations) - 1
        moment = trajectory.stop_reason.value if is_last else f"{index + 1}/{len(trajectory.steps)}"
        instruction = str(observation.get("instruction", ""))
        frame = with_caption(
            image, instruction, f"{moment}  {episode.task}  episode {episode.episode_id}"
        )
        yield from [frame] * (1 + hold if is_last else 1)
