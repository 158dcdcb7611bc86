"""Write frames to an mp4 file with the ffmpeg that imageio-ffmpeg ships."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


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
    target = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1", "-f", "mp4", str(path)]
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-y", *source, *target]
    # its own session: Ctrl-C stops the run, which then lets its videos finish
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as ffmpeg:
        try:
            _feed(ffmpeg, first, frames)
            _, words = ffmpeg.communicate()
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
            f"{words.decode(errors='replace').strip()}"
        )


def _feed(
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
