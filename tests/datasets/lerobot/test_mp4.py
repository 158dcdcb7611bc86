"""The tables of an mp4 file say the same as ffmpeg, or nothing."""

import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe
from made_datasets import encode

from vla_rl.datasets.lerobot.video_files import read_mp4_tables


def times_of(path: Path) -> np.ndarray:
    """Times of the frames that ffmpeg decodes."""
    command = [get_ffmpeg_exe(), "-i", str(path), "-vf", "showinfo", "-fps_mode", "passthrough"]
    done = subprocess.run([*command, "-f", "null", "-"], capture_output=True, check=True)
    found = np.array([float(each) for each in re.findall(rb"pts_time:(\S+)", done.stderr)])
    return found - found[0]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-use_editlist", "0"),
        ("-movflags", "faststart"),
        ("-bf", "0"),
        ("-vf", "setpts='PTS+gte(N,5)*0.3/TB'", "-fps_mode", "passthrough"),
        ("-video_track_timescale", "1000"),
    ],
    ids=["usual", "no edit list", "tables first", "no later frames", "stall", "milliseconds"],
)
def test_the_times_are_those_of_ffmpeg(options: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    encode(path, range(12), *options)
    tables = read_mp4_tables(path)
    assert tables is not None
    assert tables.size == (32, 64)
    assert len(tables.times) == 12
    assert np.allclose(tables.times, times_of(path), atol=2e-3)


def test_frames_that_an_edit_hides_are_not_counted(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    encode(whole, range(12))
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-ss", "0.45", "-i", str(whole)]
    subprocess.run([*command, "-c", "copy", str(cut)], check=True)
    tables = read_mp4_tables(cut)
    assert tables is not None
    assert len(tables.times) == len(times_of(cut)) < 12


def test_fragments_other_containers_and_damaged_tables_say_nothing(tmp_path: Path) -> None:
    fragments, other = tmp_path / "fragments.mp4", tmp_path / "other.mkv"
    encode(fragments, range(3), "-movflags", "frag_keyframe+empty_moov")
    encode(other, range(3))
    assert read_mp4_tables(fragments) is None
    assert read_mp4_tables(other) is None
    for content in (b"", b"\0" * 64, struct.pack(">I4s", 12, b"moov") + b"\xff" * 4):
        (tmp_path / "x.mp4").write_bytes(content)
        assert read_mp4_tables(tmp_path / "x.mp4") is None


def test_a_claimed_number_of_frames_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    encode(path, range(3))
    content = bytearray(path.read_bytes())
    at = content.index(b"stsz") + 12
    content[at : at + 4] = b"\xff\xff\xff\xff"
    path.write_bytes(content)
    assert read_mp4_tables(path) is None
