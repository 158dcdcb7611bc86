"""The description of a data set is read, or the file is named with what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from vla_rl.datasets.lerobot.layout import (
    INFO_FILE,
    Feature,
    Info,
    find_feature,
    get_observation_key,
    read_info,
)
from vla_rl.errors import DataError

FEATURES = {
    "action": {"dtype": "float32", "shape": [7]},
    "observation.state": {"dtype": "float32", "shape": [8]},
    "observation.images.front": {"dtype": "video", "shape": [64, 64, 3]},
}


def written(root: Path, **changes: Any) -> Path:
    fields = {
        "codebase_version": "v3.0",
        "total_episodes": 1,
        "total_frames": 5,
        "fps": 20,
        "data_path": "data/{chunk_index}",
        "features": FEATURES,
    } | changes
    (root / "meta").mkdir(exist_ok=True)
    (root / INFO_FILE).write_text(json.dumps(fields))
    return root


def test_both_published_layouts_are_read(tmp_path: Path) -> None:
    assert not read_info(written(tmp_path)).is_v2
    assert read_info(written(tmp_path, codebase_version="v2.1")).is_v2


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"codebase_version is 'v1.6', expected v3.0 or v2.1"):
        read_info(written(tmp_path, codebase_version="v1.6"))


def test_a_folder_without_a_description_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"info.json cannot be read \(No such file"):
        read_info(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"codebase_version": "v3.0"}'])
def test_a_description_of_another_form_is_refused(content: bytes, tmp_path: Path) -> None:
    (written(tmp_path) / INFO_FILE).write_bytes(content)
    with pytest.raises(DataError, match="is not a LeRobotDataset's description in UTF-8"):
        read_info(tmp_path)


@pytest.mark.parametrize(
    ("feature", "is_image", "is_vector"),
    [
        (Feature(dtype="video", shape=(64, 64, 3)), True, False),
        (Feature(dtype="image", shape=(64, 64, 3)), True, False),
        (Feature(dtype="float32", shape=(7,)), False, True),
        (Feature(dtype="bool", shape=(1,)), False, True),
        (Feature(dtype="float32", shape=(2, 7)), False, False),
        (Feature(dtype="string", shape=(1,)), False, False),
    ],
)
def test_a_feature_is_a_image_a_vector_or_neither(
    feature: Feature, is_image: bool, is_vector: bool
) -> None:
    assert (feature.is_image, feature.is_vector) == (is_image, is_vector)


def test_an_observation_has_the_name_of_its_feature_without_the_beginning() -> None:
    assert get_observation_key("observation.images.front") == "front"
    assert get_observation_key("observation.force") == "force"
    assert get_observation_key("reward") == "reward"


def info_of(root: Path) -> Info:
    return read_info(written(root))


def test_a_known_key_is_found_under_its_names_and_another_where_it_is_said(tmp_path: Path) -> None:
    info = info_of(tmp_path)
    assert find_feature(info, tmp_path, "state", {}) == "observation.state"
    assert find_feature(info, tmp_path, "wrist_image", {}) is None
    own = {"image": "observation.images.front"}
    assert find_feature(info, tmp_path, "image", own) == "observation.images.front"


def test_a_feature_that_was_named_and_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no feature 'top'; it has \['action', 'obs"):
        find_feature(info_of(tmp_path), tmp_path, "image", {"image": "top"})
