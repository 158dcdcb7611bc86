"""Lines of text below a frame."""

import contextlib
import re
import subprocess
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.reporting.record_files import FailureReporter
from vla_rl.types import ArrayRef, Observation, Trajectory
from vla_rl.util.atomic_files import replace_file, replacing

MIN_SIDE = 256
"""Smaller images are enlarged by a whole factor to at least this height and width, so that text can
be read."""

TITLE_LINES = 2
LINE_HEIGHT = 18
CHARACTER_WIDTH = 7
MARGIN = 4


def add_caption(image: NDArray[np.uint8], title: str, status: str) -> NDArray[np.uint8]:
    """Add text on black below an image: two lines of title and one of status.

    Args:
        image: uint8 [H, W, 3].
        title: wrapped to the width and cut off after two lines; characters outside ASCII are shown
            as '?'.
        status: the last line, cut off at the width.

    Returns: uint8 [H', W', 3] with even H' and W', as video codecs require; the size does not
    depend on the text.
    """
    import cv2  # slow to import, needed only to write videos

    factor = max(1, -(-MIN_SIDE // min(image.shape[:2])))
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = large.shape[0], large.shape[1] - large.shape[1] % 2
    columns = (width - 2 * MARGIN) // CHARACTER_WIDTH
    lines = [*textwrap.wrap(_ascii(title), columns), "", ""][:TITLE_LINES]
    lines.append(_ascii(status)[:columns])
    bar = np.zeros((LINE_HEIGHT * len(lines) + 2 * MARGIN + height % 2, width, 3), dtype=np.uint8)
    for number, line in enumerate(lines, start=1):
        at = (MARGIN, number * LINE_HEIGHT)
        cv2.putText(bar, line, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (255, 255, 255), 1, cv2.LINE_AA)
    return np.concatenate([large[:, :width], bar])


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()


def encode_mp4(path: Path, frames: Iterator[NDArray[np.uint8]], frames_per_s: float) -> None:
    """Encode frames as H.264, one at a time, with one thread; blocks until the file is written.

    Args:
        path: the file; overwritten.
        frames: uint8 [H, W, 3], all of one size, H and W even; at least one.
        frames_per_s: frame rate of the video.

    Raises: ValueError for a frame of another size; OSError, with ffmpeg's output, if ffmpeg fails.
    """
    from imageio_ffmpeg import get_ffmpeg_exe  # needed only to write videos

    first = next(frames)
    # ffmpeg has to know the size before its first byte; later frames are held against it
    height, width, _ = first.shape
    source = [
        "-f",
        "rawvideo",
        "-pix_fmt",
        "rgb24",
        "-s",
        f"{width}x{height}",
        "-r",
        f"{frames_per_s}",
        "-i",
        "-",
    ]
    # one thread: simulators need the cores, and a video of a few hundred small frames takes no
    # second
    target = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1", "-f", "mp4", str(path)]
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-y", *source, *target]
    # its own session: Ctrl-C stops the run, which then lets its videos finish
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as ffmpeg:
        try:
            _feed_ffmpeg(ffmpeg, first, frames)
            _, output = ffmpeg.communicate()
        except BaseException:
            ffmpeg.kill()
            assert ffmpeg.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                # flushing to a dead reader fails, and would hide ffmpeg's own error
                ffmpeg.stdin.close()
            raise
    if ffmpeg.returncode != 0:
        raise OSError(
            f"ffmpeg could not write {path} (exit code {ffmpeg.returncode}): "
            f"{output.decode(errors='replace').strip()}"
        )


def _feed_ffmpeg(
    ffmpeg: "subprocess.Popen[bytes]", first: NDArray[np.uint8], rest: Iterator[NDArray[np.uint8]]
) -> None:
    assert ffmpeg.stdin is not None
    try:
        ffmpeg.stdin.write(first.tobytes())
        for index, frame in enumerate(rest, start=1):
            if frame.shape != first.shape:
                raise ValueError(
                    f"frame {index} is {frame.shape}, expected {first.shape} like the first."
                )
            ffmpeg.stdin.write(frame.tobytes())
    except BrokenPipeError:
        return  # ffmpeg failed; its exit code and output tell why


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
            # both outcomes: a policy that fails everything, or nothing, would otherwise be shown
            # from one side
            kind = (trajectory.episode.task, trajectory.is_success)
            if kind not in self._taken:
                self._taken.add(kind)
                chosen.append(trajectory)
        return chosen

    def undo_choice(self, trajectory: Trajectory) -> None:
        """Undo the choice of a trajectory that was not written.

        The window's next one of its kind replaces it.
        """
        self._taken.discard((trajectory.episode.task, trajectory.is_success))


VideoMaker: TypeAlias = Callable[
    [Sequence[ArrayRef], Sequence[tuple[str, str]], float], "Future[NDArray[np.uint8]]"
]
"""Starts a video where its images are, as `encode_video` makes it. Called in the event loop."""


class VideoRecorder:
    """Writes chosen trajectories in a thread of its own.

    Use as a context manager; leaving it waits for the last video.

    `offer` never waits: while `max_pending` videos are unwritten, further ones are left out and
    counted in `num_left_out`, and later episodes of their kind replace them. A video that cannot be
    written is counted in `num_failed`, the first of several in a row is reported, and a later
    episode of its kind is tried.

    Args:
        folder: the folder of the videos.
        every_updates: updates of a window.
        image_key: name of the image in an observation.
        frames_per_s: decisions in a second.
        max_pending: most videos that are not written yet.
        make_video: makes videos of images that another process holds; None if this one holds all.
    """

    def __init__(
        self,
        folder: Path,
        every_updates: int,
        *,
        image_key: str = "image",
        frames_per_s: float = 5.0,
        max_pending: int = 8,
        make_video: VideoMaker | None = None,
    ) -> None:
        self._folder, self._image_key, self._frames_per_s = folder, image_key, frames_per_s
        self._choice, self._make_video = VideoChoice(every_updates), make_video
        self._room = threading.BoundedSemaphore(max_pending)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="videos")
        self._failures = FailureReporter(
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
                self._choice.undo_choice(trajectory)
                continue
            path = self._folder / video_name(update, trajectory)
            job = self._begin(path, trajectory)
            job.add_done_callback(partial(self._done, path.name, trajectory))

    def close(self) -> None:
        """Wait until every accepted video is written."""
        self._thread.shutdown(wait=True)

    def _begin(self, path: Path, trajectory: Trajectory) -> Future[None]:
        if trajectory.cached_images is None or self._make_video is None:
            return self._thread.submit(
                write_video, path, trajectory, self._image_key, self._frames_per_s
            )
        try:
            images = video_images(trajectory, self._image_key)
        except ValueError as error:
            failed: Future[None] = Future()
            failed.set_exception(error)
            return failed
        cached_images = [image for image in images if isinstance(image, ArrayRef)]
        # started here and now: the images are dropped after the update
        video = self._make_video(cached_images, video_captions(trajectory), self._frames_per_s)
        return self._thread.submit(_write_encoded, path, video)

    def _done(self, name: str, trajectory: Trajectory, job: Future[None]) -> None:
        self._room.release()
        error = job.exception()
        if error is None:
            self.num_written += 1
            self._failures.worked()
            return
        self._failures.failed(name, error)
        if isinstance(error, OSError):
            self._choice.undo_choice(trajectory)


def video_name(update: int, trajectory: Trajectory) -> str:
    """Return a file name such as `update_00012_libero_goal-3_success_episode_345.mp4`."""
    task = re.sub(r"[^A-Za-z0-9._]+", "-", trajectory.episode.task)
    outcome = "success" if trajectory.is_success else "failure"
    return f"update_{update:05d}_{task}_{outcome}_episode_{trajectory.episode.episode_id}.mp4"


def write_video(
    path: Path, trajectory: Trajectory, image_key: str = "image", frames_per_s: float = 5.0
) -> None:
    """Write one trajectory as mp4 (H.264).

    It has one frame for each decision, and the final frame for a second. If a planner called the robot,
    `path` with the ending .txt has what both said.

    Blocks while ffmpeg encodes; call it from a thread. `path` appears only when the file is
    complete.

    Raises: ValueError, naming the episode, if its observations have no images or change their size;
    OSError if ffmpeg cannot write.
    """
    images = (_require_array(image) for image in video_images(trajectory, image_key))
    if transcript := format_transcript(trajectory):
        replace_file(path.with_suffix(".txt"), transcript.encode())
    with replacing(path, path.with_suffix(".part.mp4")) as part:
        encode_mp4(
            part, captioned_frames(images, video_captions(trajectory), frames_per_s), frames_per_s
        )


def encode_video(
    images: Sequence[NDArray[np.uint8]], captions: Sequence[tuple[str, str]], frames_per_s: float
) -> NDArray[np.uint8]:
    """Return the bytes of a video as `write_video` writes it; blocks meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        encode_mp4(path, captioned_frames(images, captions, frames_per_s), frames_per_s)
        return np.fromfile(path, np.uint8)


def captioned_frames(
    images: Iterable[NDArray[np.uint8]], captions: Sequence[tuple[str, str]], frames_per_s: float
) -> Iterator[NDArray[np.uint8]]:
    """Yield each image as a frame with its two lines; the final one for a second more."""
    for number, (image, lines) in enumerate(zip(images, captions, strict=True), start=1):
        frame = add_caption(image, *lines)
        is_last = number == len(captions)
        yield from [frame] * (1 + max(1, round(frames_per_s)) if is_last else 1)


def video_captions(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Return the two lines below each image of a video."""
    episode, num_steps = trajectory.episode, len(_observations(trajectory)) - 1
    moments = [f"{number}/{num_steps}" for number in range(1, num_steps + 1)]
    return [
        (
            words if isinstance(words := observation.get("instruction"), str) else "",
            f"{moment}  {episode.task}  episode {episode.episode_id}",
        )
        for observation, moment in zip(
            _observations(trajectory), [*moments, trajectory.stop_reason.value], strict=True
        )
    ]


def format_transcript(trajectory: Trajectory) -> str:
    """Return what a planner asked for and was answered, a line each; empty if none acted."""
    calls = trajectory.info.get("calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return ""
    lines = [f"request: {trajectory.info.get('request', '')}"]
    for number, call in enumerate(calls, start=1):
        asked = f"{call.get('tool', '')} {call.get('said', '')}".strip()
        lines += [f"{number}. planner: {asked}", f"   answer: {call.get('answer', '')}"]
    return "\n".join([*lines, f"end: {trajectory.stop_reason.value}", ""])


def list_transcripts(folder: Path) -> list[tuple[Path, str]]:
    """Return the videos of a folder that have a transcript beside them, each with it, the newest first."""
    texts = sorted(folder.glob("update_*.txt"), reverse=True)
    videos = [(text.with_suffix(".mp4"), text) for text in texts]
    return [(video, text.read_text(encoding="utf-8")) for video, text in videos if video.exists()]


def video_images(trajectory: Trajectory, image_key: str) -> list[NDArray[np.uint8] | ArrayRef]:
    """Return the image of each observation, the final one included.

    Raises: ValueError, naming the episode, if one has none.
    """
    images: list[NDArray[np.uint8] | ArrayRef] = []
    for index, observation in enumerate(_observations(trajectory)):
        image = observation.get(image_key)
        if (
            not isinstance(image, np.ndarray | ArrayRef)
            or np.dtype(image.dtype) != np.uint8
            or image.shape[2:] != (3,)
        ):
            raise ValueError(
                f"episode {trajectory.episode.episode_id} has no uint8 [H, W, 3] {image_key!r} in "
                f"observation {index}, only {sorted(observation)}; a video needs these frames."
            )
        images.append(image)
    return images


def _observations(trajectory: Trajectory) -> list[Observation]:
    """Return what is shown: a planner's replies have no image of their own."""
    shown = [step.observation for step in trajectory.steps if not step.is_reply]
    return [
        *(shown or [step.observation for step in trajectory.steps]),
        trajectory.final_observation,
    ]


def _require_array(image: NDArray[np.uint8] | ArrayRef) -> NDArray[np.uint8]:
    assert isinstance(image, np.ndarray), "a video of references is made where the images are"
    return image


def _write_encoded(path: Path, video: Future[NDArray[np.uint8]]) -> None:
    with replacing(path, path.with_suffix(".part.mp4")) as part:
        video.result().tofile(part)
