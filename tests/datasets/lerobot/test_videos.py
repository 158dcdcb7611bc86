"""Each row gets its own frame of a video, or the data set is refused when it is opened.

The tables of an mp4 file say the same as ffmpeg, or nothing.
"""

import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from imageio_ffmpeg import get_ffmpeg_exe
from made_datasets import CAMERA, VIDEO_PATH, change_rows, encode, filmed, shown

from vla_rl.datasets import read_lerobot
from vla_rl.datasets.lerobot.video_files import read_mp4_tables, read_video_tables
from vla_rl.errors import DataError

LATE = ("-vf", "setpts='PTS+gte(N,5)*0.3/TB'", "-fps_mode", "passthrough")
"""Frame 5 and all after it come 0.3 s late."""


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("vla_rl.datasets")
    ]


def test_no_frame_is_repeated_or_lost_where_the_camera_stalled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encode(filmed(tmp_path), range(10), *LATE)
    (episode,) = read_lerobot(tmp_path)
    assert shown(episode) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    (line,) = lines(caplog)
    assert re.search(
        r"frames at another rate than .* 10 a second, .*mp4 at 7\.5; .* frame k is", line
    )


@pytest.mark.parametrize("begins", [(0.0, 0.5), (0.0, 0.8)], ids=["nominal", "as it was filmed"])
def test_a_stall_in_one_episode_does_not_shift_the_next(
    begins: tuple[float, float], tmp_path: Path
) -> None:
    encode(filmed(tmp_path, (5, 5), begins_s=begins), range(10), *LATE)
    assert [shown(episode) for episode in read_lerobot(tmp_path)] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ]


def test_in_a_file_of_another_rate_the_frames_are_those_of_the_rows_times(tmp_path: Path) -> None:
    encode(filmed(tmp_path, (5, 5)), range(30), fps=30.0)
    first, second = read_lerobot(tmp_path)
    assert shown(first) == [0, 3, 6, 9, 12]
    assert shown(second) == [15, 18, 21, 24, 27]  # those that LeRobot picks


def test_rows_that_have_no_frame_at_their_time_are_refused(tmp_path: Path) -> None:
    path = filmed(tmp_path, (5, 5))
    encode(path, range(16), fps=15.0)
    with pytest.raises(
        DataError,
        match=r"frame 1 of episode 0 is at 0\.1000 s, and the nearest of the file's 16 frames at "
        r"0\.1333 s \(15 frames a second; meta/info\.json has fps 10\), expected a frame for each row",
    ):
        read_lerobot(tmp_path)


def test_rows_name_their_times_themselves(tmp_path: Path) -> None:
    """An episode that was cut at its begin keeps the times of the whole video."""
    encode(filmed(tmp_path, (5,)), range(10))

    def cut(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["timestamp"] += 0.5

    change_rows(tmp_path, cut)
    assert shown(read_lerobot(tmp_path)[0]) == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("useless", [0.0, float("nan")])
def test_times_of_rows_that_do_not_go_on_are_not_used(useless: float, tmp_path: Path) -> None:
    encode(filmed(tmp_path, (5,)), range(10))

    def spoil(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["timestamp"] = useless

    change_rows(tmp_path, spoil)
    assert shown(read_lerobot(tmp_path)[0]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lengths", [(10,), (4, 6)])
def test_a_video_that_is_one_frame_short_is_noticed_when_the_data_set_is_opened(
    lengths: tuple[int, ...], tmp_path: Path
) -> None:
    encode(filmed(tmp_path, lengths), range(9))
    with pytest.raises(
        DataError, match=r"file-000\.mp4 has 9 frames, expected 10, one for each row of "
    ):
        read_lerobot(tmp_path)


def test_a_video_that_ends_within_an_episode_is_noticed_among_longer_ones(tmp_path: Path) -> None:
    """The file has frames enough, but the second episode begins too late in it."""
    encode(filmed(tmp_path, (3, 5), begins_s=(0.0, 0.6)), range(10))
    with pytest.raises(DataError, match=r"frame 4 of episode 1 is at 1\.0000 s, and the nearest"):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    "described",
    [{"shape": [64, 32, 3]}, {"shape": [64, 32, 3], "names": None}, {"shape": [3, 64, 32]}],
    ids=["names", "no names", "channels first"],
)
def test_a_size_other_than_described_is_refused_with_both(
    described: dict[str, Any], tmp_path: Path
) -> None:
    encode(filmed(tmp_path, described={"names": None, **described}), range(10))
    with pytest.raises(
        DataError,
        match=r"file-000\.mp4 has images of 32x64 \(height x width\), meta/info\.json describes "
        r"'observation\.images\.image' as 64x32",
    ):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    "described",
    [
        {"shape": [64, 32, 3], "names": ["width", "height", "channel"]},
        {"shape": [3, 32, 64], "names": ["channels", "height", "width"]},
        {"shape": [3, 32, 64], "names": None},
        {"shape": [32, 64, 3], "names": {"axes": 3}},
        {"shape": [7], "names": None},
    ],
)
def test_a_size_is_read_in_any_order_of_axes(described: dict[str, Any], tmp_path: Path) -> None:
    encode(filmed(tmp_path, described=described), range(10))
    (episode,) = read_lerobot(tmp_path)
    assert episode.frames["image"](3).shape == (32, 64, 3)
    assert shown(episode) == list(range(10))


def test_a_video_that_viewers_turn_is_read_as_it_was_coded(tmp_path: Path) -> None:
    path = filmed(tmp_path)
    flat = tmp_path / "flat.mp4"
    encode(flat, range(10))
    turn = ["-display_rotation", "90", "-i", str(flat), "-c", "copy", str(path)]
    subprocess.run([get_ffmpeg_exe(), "-loglevel", "error", *turn], check=True)
    (episode,) = read_lerobot(tmp_path)
    assert episode.frames["image"](0).shape == (32, 64, 3)
    assert shown(episode) == list(range(10))


@pytest.mark.parametrize(
    "options",
    [
        ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-use_editlist", "0"),
        ("-c:v", "libsvtav1", "-pix_fmt", "yuv420p", "-g", "2"),
        ("-c:v", "libx265", "-pix_fmt", "yuv420p", "-x265-params", "log-level=none"),
        ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "frag_keyframe+empty_moov"),
        ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-f", "matroska"),
    ],
    ids=["no edit list", "av1", "hevc", "fragments", "matroska"],
)
def test_every_usual_codec_and_container_gives_each_row_its_frame(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    if "libsvtav1" in options:
        options = ("-vf", "scale=128:64", *options)  # it takes no smaller ones
    path = filmed(tmp_path, (4, 6), described={"shape": [7]})
    encode(path, range(10), *options)
    assert len(read_video_tables(path).times) == 10
    assert [shown(episode) for episode in read_lerobot(tmp_path)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
    ]


def test_a_folder_whose_name_ffmpeg_would_take_for_an_address_is_read(tmp_path: Path) -> None:
    root = tmp_path / "concat:a|b"
    encode(filmed(root), range(10))
    assert shown(read_lerobot(root)[0]) == list(range(10))


def test_a_playlist_that_is_named_like_a_video_is_refused(tmp_path: Path) -> None:
    path = filmed(tmp_path)
    encode(tmp_path / "elsewhere.mp4", range(10))
    path.write_text(f"ffconcat version 1.0\nfile {tmp_path / 'elsewhere.mp4'}\n")
    with pytest.raises(DataError, match=r"file-000\.mp4 is not a whole video"):
        read_lerobot(tmp_path)


def test_a_camera_that_no_policy_may_read_stops_nobody_until_it_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encode(filmed(tmp_path, camera="observation.images.head"), range(9))
    (episode,) = read_lerobot(tmp_path)
    (line,) = lines(caplog)
    assert "has 9 frames, expected 10" in line
    assert "matters only if this camera is read" in line
    assert episode.observation(0, cameras=())["state"].shape == (8,)
    with pytest.raises(DataError, match="has 9 frames, expected 10"):
        episode.frames["head"](0)


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"info": {"video.is_depth_map": True}}, "meta/info.json says that it is a depth map"),
        ({"info": {"video.pix_fmt": "gray12le"}}, "meta/info.json says that it is a depth map"),
        ({"video_info": {"is_depth_map": True}}, "meta/info.json says that it is a depth map"),
    ],
)
def test_a_depth_camera_is_left_out_with_a_line(
    described: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encode(filmed(tmp_path, camera="observation.images.depth", described=described), range(10))
    (episode,) = read_lerobot(tmp_path)
    assert set(episode.frames) == set()
    (line,) = lines(caplog)
    assert f"the camera 'depth' (observation.images.depth) is left out: {reason}" in line
    with pytest.raises(DataError, match=r"fields name 'observation\.images\.depth' for"):
        read_lerobot(tmp_path, fields={"image": "observation.images.depth"})


def test_deep_grey_frames_of_a_camera_that_does_not_say_so_are_refused(tmp_path: Path) -> None:
    encode(filmed(tmp_path), range(10), "-c:v", "ffv1", "-pix_fmt", "gray12le")
    (episode,) = read_lerobot(tmp_path)
    with pytest.raises(DataError, match="holds gray12le, more than 8 bits of one channel"):
        episode.frames["image"](0)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("videos/{camera}.mp4", r"names \{camera\}, expected a path below the folder"),
        ("videos/{}.mp4", r"names \{\}, expected"),
        ("videos/{video_key.__class__}.mp4", r"names \{video_key\.__class__\}, expected"),
        ("videos/{episode_index:0999999999d}.mp4", r"formats \{episode_index\} with '0999999999d'"),
        ("videos/{video_key:d}.mp4", "is not a pattern"),
        ("videos/{video_key", "is not a pattern"),
        ("/etc/{video_key}", "leads to '/etc/observation.images.image'"),
        ("../{video_key}", r"leads to '\.\./observation.images.image'"),
    ],
)
def test_a_pattern_of_paths_that_cannot_be_used_is_refused(
    pattern: str, message: str, tmp_path: Path
) -> None:
    encode(filmed(tmp_path), range(10))
    info = (tmp_path / "meta/info.json").read_text()
    (tmp_path / "meta/info.json").write_text(info.replace(VIDEO_PATH, pattern))
    with pytest.raises(DataError, match=r"meta/info\.json: the path .*" + message):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"), [("from_timestamp", "soon"), ("from_timestamp", np.nan), ("file_index", -1)]
)
def test_a_place_in_a_video_that_is_none_is_named(field: str, value: Any, tmp_path: Path) -> None:
    encode(filmed(tmp_path), range(10))
    path = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    (row,) = pq.read_table(path).to_pylist()
    row[f"videos/{CAMERA}/{field}"] = value
    pq.write_table(pa.Table.from_pylist([row]), path)
    with pytest.raises(
        DataError, match=rf"file-000\.parquet, row 0: 'videos/{CAMERA}/{field}' is "
    ):
        read_lerobot(tmp_path)


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
