"""Published LeRobotDatasets are read as they are; what is wrong with one is named with its file, row and episode."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_datasets import FEATURES, TASKS, change_rows, columns_of, frames, published

from vla_rl.datasets import read_lerobot
from vla_rl.datasets.lerobot.layout import encode_png
from vla_rl.errors import DataError
from vla_rl.reporting.videos import encode_mp4


def test_a_published_data_set_is_read(tmp_path: Path) -> None:
    first, second = read_lerobot(published(tmp_path))
    assert (first.instruction, second.instruction) == ("open the drawer", "close the drawer")
    assert (first.num_steps, second.num_steps) == (3, 4)
    assert second.actions[2].tolist() == pytest.approx([0.2] * 6 + [1.0])
    observation = second.observation(3)
    assert observation["instruction"] == "close the drawer"
    assert observation["state"].tolist() == [1.0] * 7 + [3.0]
    assert np.array_equal(observation["image"], frames(1, 4)[3])
    assert np.array_equal(observation["wrist_image"], frames(51, 4)[3])
    assert second.is_success is None


def test_version_2_1_with_one_file_an_episode_is_read(tmp_path: Path) -> None:
    (tmp_path / "meta").mkdir()
    (tmp_path / "data/chunk-000").mkdir(parents=True)
    info = {
        "codebase_version": "v2.1",
        "total_episodes": 2,
        "total_frames": 5,
        "chunks_size": 1000,
        "fps": 10,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": FEATURES,
    }
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    tasks = [json.dumps({"task_index": key, "task": text}) for key, text in TASKS.items()]
    (tmp_path / "meta/tasks.jsonl").write_text("\n".join(tasks))
    lines = [
        json.dumps({"episode_index": k, "tasks": [TASKS[k]], "length": k + 2}) for k in range(2)
    ]
    (tmp_path / "meta/episodes.jsonl").write_text("\n".join(lines))
    for number, num in enumerate((2, 3)):
        table = pa.table(columns_of(number, num, 2 * number, number))
        pq.write_table(table, tmp_path / f"data/chunk-000/episode_{number:06d}.parquet")
    first, second = read_lerobot(tmp_path)
    assert (first.num_steps, second.num_steps, second.instruction) == (2, 3, "close the drawer")
    assert np.array_equal(second.frames["image"](1), frames(1, 3)[1])


def test_frames_of_videos_are_cut_out_of_one_file_for_several_episodes(tmp_path: Path) -> None:
    video = {"dtype": "video", "shape": [32, 32, 3], "names": ["height", "width", "channel"]}
    features = {
        **{key: value for key, value in FEATURES.items() if "images" not in key},
        "observation.images.image": video,
    }
    published(
        tmp_path,
        (3, 4),
        features=features,
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    )
    about = [
        {
            "episode_index": number,
            "videos/observation.images.image/chunk_index": 0,
            "videos/observation.images.image/file_index": 0,
            "videos/observation.images.image/from_timestamp": begin / 10,
        }
        for number, begin in enumerate((0, 3))
    ]
    pq.write_table(
        pa.Table.from_pylist(about), tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    )
    path = tmp_path / "videos/observation.images.image/chunk-000/file-000.mp4"
    path.parent.mkdir(parents=True)
    grey = [np.full((32, 32, 3), 30 * number, np.uint8) for number in range(7)]
    encode_mp4(path, iter(grey), 10.0)
    first, second = read_lerobot(tmp_path)
    assert [round(float(first.frames["image"](step).mean()) / 30) for step in range(3)] == [0, 1, 2]
    assert [round(float(second.frames["image"](step).mean()) / 30) for step in range(4)] == [
        3,
        4,
        5,
        6,
    ]
    assert np.abs(second.frames["image"](1).astype(int) - 120).max() <= 6
    known = (tmp_path / "meta/episodes/chunk-000/file-000.parquet").read_bytes()
    pq.write_table(
        pa.Table.from_pylist(about[:1]), tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    )
    with pytest.raises(
        DataError, match=r"meta/episodes has no 'videos/.*/chunk_index' for episode 1"
    ):
        read_lerobot(tmp_path)
    (tmp_path / "meta/episodes/chunk-000/file-000.parquet").write_bytes(known)
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(DataError, match=r"file-000\.mp4 is not a whole video: moov atom not found"):
        read_lerobot(tmp_path)


def test_every_camera_and_every_vector_of_numbers_is_read_and_the_rest_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more = {
        "observation.images.head": FEATURES["observation.images.image"],
        "observation.force": {"dtype": "float64", "shape": [3], "names": None},
        "observation.buttons": {"dtype": "bool", "shape": [2], "names": None},
        "observation.depth": {"dtype": "float32", "shape": [2, 2], "names": None},
        "observation.words": {"dtype": "string", "shape": [1], "names": None},
    }
    seen = frames(200, 7)

    def add(rows: list[dict[str, Any]]) -> None:
        for number, row in enumerate(rows):
            row["observation.images.head"] = {"bytes": encode_png(seen[number]), "path": None}
            row |= {
                "observation.force": [float(number)] * 3,
                "observation.buttons": [number % 2 == 0, True],
            }
            row |= {"observation.depth": [[0.0, 1.0], [2.0, 3.0]], "observation.words": "well"}

    change_rows(published(tmp_path, features={**FEATURES, **more}), add)
    with caplog.at_level(logging.WARNING):
        _, second = read_lerobot(tmp_path)
    observation = second.observation(1)  # row 4 of all
    assert np.array_equal(observation["head"], seen[4])
    assert observation["force"].tolist() == [4.0, 4.0, 4.0]
    assert observation["buttons"].tolist() == [1.0, 1.0]
    assert {value.dtype for value in second.vectors.values()} == {np.dtype(np.float32)}
    assert "head" not in second.observation(1, cameras=("image",))
    assert set(observation) == {
        "image",
        "wrist_image",
        "head",
        "state",
        "force",
        "buttons",
        "instruction",
    }
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("vla_rl")]
    assert "left out: depth, words" in line


def test_bytes_that_are_no_image_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    with pytest.raises(
        DataError, match=r"'observation\.state' is of dtype 'float32', expected image or video"
    ):
        read_lerobot(tmp_path, fields={"image": "observation.state"})


@pytest.mark.parametrize("shape", [[], [2, 4]])
def test_a_state_that_is_no_vector_is_refused(shape: list[int], tmp_path: Path) -> None:
    published(
        tmp_path,
        features={
            **FEATURES,
            "observation.state": {"dtype": "float32", "shape": shape, "names": None},
        },
    )
    with pytest.raises(
        DataError,
        match=r"'observation\.state' is float32 of shape \[.*\], expected a vector of numbers",
    ):
        read_lerobot(tmp_path)


def test_two_features_of_one_name_are_refused(tmp_path: Path) -> None:
    force = {"dtype": "float32", "shape": [3], "names": None}
    twice = {
        "observation.front": force,
        "observation.images.front": FEATURES["observation.images.image"],
    }
    published(tmp_path, features={**FEATURES, **twice})
    with pytest.raises(DataError, match="would both be named 'front'"):
        read_lerobot(tmp_path)


SINGLE = {
    "observation.gripper": {"dtype": "float32", "shape": [1], "names": ["gripper"]},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.success": {"dtype": "bool", "shape": [1], "names": None},
}
NARROW = {**FEATURES, **SINGLE, "action": {"dtype": "float32", "shape": [1], "names": ["slide"]}}


@pytest.mark.parametrize(
    "wrapped", [lambda number: number, lambda number: [number]], ids=["plain", "list of one"]
)
def test_single_numbers_are_vectors_of_one_however_they_are_stored(
    wrapped: Callable[[Any], Any], tmp_path: Path
) -> None:
    def narrow(rows: list[dict[str, Any]]) -> None:
        for number, row in enumerate(rows):
            row["action"] = wrapped(0.5 * number)
            row["observation.gripper"] = wrapped(float(number))
            row["next.reward"] = wrapped(2.0 * number)
            row["next.success"] = wrapped(number == 6)

    change_rows(published(tmp_path, features=NARROW), narrow)
    first, second = read_lerobot(tmp_path)
    assert second.actions.tolist() == [[1.5], [2.0], [2.5], [3.0]]
    assert first.vectors["gripper"].tolist() == [[0.0], [1.0], [2.0]]
    assert second.observation(3)["gripper"].tolist() == [6.0]
    assert second.rewards is not None
    assert second.rewards.tolist() == [6.0, 8.0, 10.0, 12.0]
    assert (first.is_success, second.is_success) == (False, True)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            [1.0, 2.0],
            r"'observation\.gripper' has 2 numbers in row 4 \(episode 1, frame 1\), expected 1",
        ),
        (
            float("inf"),
            r"'observation\.gripper' is not a finite number in row 4 \(episode 1, frame 1\)",
        ),
        ("open", r"'observation\.gripper' holds string, expected numbers"),
        ({"x": 1.0}, r"'observation\.gripper' holds struct<x: double>, expected numbers"),
    ],
)
def test_what_is_no_single_number_is_named(stored: Any, message: str, tmp_path: Path) -> None:
    usual = 1.0 if isinstance(stored, float) else [1.0] if isinstance(stored, list) else stored
    features = {**FEATURES, "observation.gripper": SINGLE["observation.gripper"]}

    def narrow(rows: list[dict[str, Any]]) -> None:
        for number, row in enumerate(rows):
            row["observation.gripper"] = stored if number == 4 else usual

    change_rows(published(tmp_path, features=features), narrow)
    with pytest.raises(DataError, match=message):
        read_lerobot(tmp_path)


def without_actions(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        del row["action"]


def short_action(rows: list[dict[str, Any]]) -> None:
    rows[5]["action"] = [0.0] * 6


def empty_state(rows: list[dict[str, Any]]) -> None:
    rows[4]["observation.state"] = None


def not_a_number(rows: list[dict[str, Any]]) -> None:
    rows[6]["action"][2] = float("nan")


def plain_action(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row["action"] = 0.0


def frame_lost(rows: list[dict[str, Any]]) -> None:
    del rows[1]


def episode_lost(rows: list[dict[str, Any]]) -> None:
    del rows[3:]


def other_task(rows: list[dict[str, Any]]) -> None:
    rows[3]["task_index"] = 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_actions, r"file-000\.parquet has no column 'action'; it has \["),
        (short_action, r"'action' has 6 numbers in row 5 \(episode 1, frame 2\), expected 7"),
        (empty_state, r"'observation\.state' is empty in row 4 \(episode 1, frame 1\)"),
        (not_a_number, r"'action' is not a finite number in row 6 \(episode 1, frame 3\)"),
        (plain_action, r"'action' holds double, expected lists of 7 numbers"),
        (frame_lost, r"row 1 \(episode 0, frame 2\) is out of order, expected frame 1"),
        (
            episode_lost,
            r"lists 2 episodes, the data files hold 1; episode 1 is the first that is missing",
        ),
        (other_task, r"row 3 \(episode 1, frame 0\) has task 9, which meta/tasks does not name"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(
    change: Callable[[list[dict[str, Any]]], None], message: str, tmp_path: Path
) -> None:
    change_rows(published(tmp_path), change)
    with pytest.raises(DataError, match=message):
        read_lerobot(tmp_path)


def test_an_image_that_is_none_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    def damage(rows: list[dict[str, Any]]) -> None:
        rows[2]["observation.images.image"]["bytes"] = b"no image"
        rows[4]["observation.images.image"] = {"bytes": None, "path": None}

    change_rows(published(tmp_path), damage)
    first, second = read_lerobot(tmp_path)
    assert first.frames["image"](1).shape == (12, 12, 3)
    with pytest.raises(DataError, match=r"row 2 \(episode 0, frame 2\) is not a PNG or JPEG image"):
        first.frames["image"](2)
    with pytest.raises(
        DataError, match=r"'observation\.images\.image' is empty in row 4 \(episode 1, frame 1\)"
    ):
        second.frames["image"](1)


def test_fields_with_unusual_names_can_be_named(tmp_path: Path) -> None:
    features = {
        ("observation.images.front" if key == "observation.images.image" else key): v
        for key, v in FEATURES.items()
    }
    published(tmp_path, features=features)

    def rename(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["observation.images.front"] = row.pop("observation.images.image")

    change_rows(tmp_path, rename)
    with pytest.raises(
        DataError, match=r"has no images 'image', .* set fields = .* to its feature"
    ):
        read_lerobot(tmp_path)[0].observation(0, cameras=("image",))
    (episode, _) = read_lerobot(tmp_path, fields={"image": "observation.images.front"})
    assert np.array_equal(episode.frames["image"](0), frames(0, 3)[0])
    with pytest.raises(DataError, match=r"no feature .observation\.images\.back."):
        read_lerobot(tmp_path, fields={"image": "observation.images.back"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: (root / "meta/info.json").write_text("{"),
            "is not a LeRobotDataset's description",
        ),
        (lambda root: (root / "meta/info.json").unlink(), r"info\.json cannot be read"),
        (
            lambda root: published(root, codebase_version="v1.6"),
            "codebase_version is 'v1.6', expected v3.0 or v2.1",
        ),
        (
            lambda root: cut(root / "data/chunk-000/file-000.parquet"),
            r"file-000\.parquet is not a whole Parquet file",
        ),
        (
            lambda root: cut(root / "meta/tasks.parquet"),
            r"tasks\.parquet is not a whole Parquet file",
        ),
    ],
)
def test_a_damaged_data_set_is_refused(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    damage(published(tmp_path))
    with pytest.raises(DataError, match=message):
        read_lerobot(tmp_path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


DISTANCES = np.arange(144, dtype=np.uint16).reshape(12, 12) * 256 + 7


def stored(root: Path, name: str, images: list[np.ndarray], ending: str = ".png") -> Path:
    """A data set of 3 rows with one more camera, whose images are stored as they are given."""
    described = {"dtype": "image", "shape": [12, 12, 3], "names": None}
    published(root, (len(images),), features={**FEATURES, f"observation.images.{name}": described})

    def add(rows: list[dict[str, Any]]) -> None:
        for row, image in zip(rows, images, strict=True):
            data = bytes(cv2.imencode(ending, image)[1])
            row[f"observation.images.{name}"] = {"bytes": data, "path": None}

    change_rows(root, add)
    return root


@pytest.mark.parametrize(
    ("image", "ending"),
    [(DISTANCES, ".png"), (DISTANCES, ".tiff"), (DISTANCES.astype(np.float32), ".tiff")],
    ids=["png", "tiff", "tiff of floats"],
)
def test_a_camera_of_more_than_8_bits_is_left_out_with_a_line(
    image: np.ndarray, ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, "depth", [image] * 3, ending)
    (episode,) = read_lerobot(tmp_path)
    assert set(episode.frames) == {"image", "wrist_image"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the camera 'depth' (observation.images.depth) is left out: its images are" in line
    assert f"{image.dtype} of 1 channel, expected 8 bits a channel" in line
    with pytest.raises(DataError, match=r"fields name 'observation\.images\.depth' for 'image'"):
        read_lerobot(tmp_path, fields={"image": "observation.images.depth"})


def test_one_deep_image_among_others_is_never_squeezed(tmp_path: Path) -> None:
    colour = frames(1, 1)[0]
    (episode,) = read_lerobot(stored(tmp_path, "head", [colour, DISTANCES, colour]))
    assert np.array_equal(episode.frames["head"](2), colour[..., ::-1])
    with pytest.raises(
        DataError, match=r"'observation\.images\.head' is uint16 of 1 channel in row 1"
    ):
        episode.frames["head"](1)


def test_grey_transparent_and_palette_images_stay_readable(tmp_path: Path) -> None:
    colour = frames(1, 1)[0]
    grey, alpha = colour[..., 0], np.dstack([colour, colour[..., :1]])
    (episode,) = read_lerobot(stored(tmp_path, "head", [grey, alpha, colour]))
    assert np.array_equal(episode.frames["head"](0), np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(episode.frames["head"](1), colour[..., ::-1])
    assert np.array_equal(episode.frames["head"](2), colour[..., ::-1])
    assert {episode.frames["head"](step).dtype for step in range(3)} == {np.dtype(np.uint8)}


def test_a_size_other_than_described_gets_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = np.zeros((6, 12, 3), np.uint8)
    (episode,) = read_lerobot(stored(tmp_path, "head", [wide] * 3))
    assert [episode.frames["head"](step).shape for step in range(3)] == [(6, 12, 3)] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'observation.images.head' is 6x12 (height x width) in row 0" in line
    assert "meta/info.json says 12x12" in line


def test_a_flipped_byte_of_a_png_is_noticed(tmp_path: Path) -> None:
    def flip(rows: list[dict[str, Any]]) -> None:
        image = rows[1]["observation.images.image"]
        data = bytearray(image["bytes"])
        data[len(data) // 2] ^= 1
        image["bytes"] = bytes(data)

    change_rows(published(tmp_path, (3,)), flip)
    (episode,) = read_lerobot(tmp_path)
    with pytest.raises(DataError, match=r"row 1 \(episode 0, frame 1\) is not a PNG or JPEG image"):
        episode.frames["image"](1)


@pytest.mark.parametrize("path", ["images/none.png", "/dev/zero", "images"])
def test_an_image_in_a_file_that_is_none_is_named(path: str, tmp_path: Path) -> None:
    def outside(rows: list[dict[str, Any]]) -> None:
        rows[1]["observation.images.image"] = {"bytes": None, "path": path}

    change_rows(published(tmp_path, (3,)), outside)
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=rf"row 1 \(.*\) names {path}, which is no file"):
        read_lerobot(tmp_path)[0].frames["image"](1)


def test_images_stored_as_plain_bytes_are_read(tmp_path: Path) -> None:
    def plain(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["observation.images.image"] = row["observation.images.image"]["bytes"]

    change_rows(published(tmp_path, (3,)), plain)
    assert np.array_equal(read_lerobot(tmp_path)[0].frames["image"](2), frames(0, 3)[2])


def test_episodes_that_are_held_out_are_not_learnt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published(tmp_path, (3, 4, 2), splits={"train": "0:2", "val": "2:3"})
    assert [episode.num_steps for episode in read_lerobot(tmp_path)] == [3, 4]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "has val beside the split train, and is read without: 2 of 3 episodes" in line
