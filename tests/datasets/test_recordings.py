"""Recordings whose arrays are of other kinds than ours are refused by name, not converted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import recording

from vla_rl.datasets import compute_statistics, read_recording
from vla_rl.datasets.opening import read_image_settings
from vla_rl.errors import DataError


def changed(root: Path, **arrays: Any) -> Path:
    recording(root)
    with np.load(root / "0000.npz") as file:
        known = dict(file)
    np.savez(root / "0000.npz", **{**known, **arrays})
    return root / "0000.npz"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"instruction": np.array(5)}, "'instruction' is 5, expected a text"),
        ({"instruction": np.array(["a", "b"])}, "'instruction' is missing"),
        ({"instruction": np.array("half \ud835")}, "'instruction' is 'half"),
        ({"task": np.array(1.5)}, "'task' is 1.5, expected a text"),
        ({"init_state_id": np.array("3")}, "'init_state_id' is '3', expected a whole number"),
        ({"is_success": np.array("False")}, "'is_success' is 'False', expected true or false"),
        ({"is_success": np.array([True])}, "'is_success' is None, expected true or false"),
        ({"action": np.array([["1"] * 7] * 3)}, r"'action' is <U1 of shape \[3, 7\], expected num"),
        ({"state": np.array(1.0)}, r"'state' is float64 of shape \[\], expected numbers"),
        ({"image": np.zeros((3, 8, 8, 3))}, r"'image' is float64 of shape .* expected images"),
        ({"image": np.array([{}] * 3)}, "'image' holds Python objects"),
    ],
)
def test_an_array_of_another_kind_is_refused(
    arrays: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, **arrays)
    with pytest.raises(DataError, match=r"0000\.npz.*" + message):
        read_recording(path)


def test_settings_that_are_of_other_types_are_refused_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.settings.json").write_text('{"image_size": 84, "quality": "fast", "x": 1}')
    assert read_image_settings(tmp_path) == {
        "image_size": 84,
        "quality": "fast",
        "assets": None,
    }
    (tmp_path / "a.settings.json").write_text('{"image_size": "84"}')
    with pytest.raises(DataError, match=r"a\.settings\.json is not the settings.*image_size"):
        read_image_settings(tmp_path)


def test_statistics_of_episodes_of_different_widths_are_refused_with_both(tmp_path: Path) -> None:
    seven = read_recording(changed(tmp_path / "seven"))
    six = read_recording(changed(tmp_path / "six", action=np.zeros((3, 6))))
    with pytest.raises(DataError, match=r"'actions' has 6 numbers in .*six.* and 7 in .*seven"):
        compute_statistics([seven, six])
    wide = read_recording(changed(tmp_path / "wide", state=np.zeros((3, 9))))
    with pytest.raises(DataError, match=r"'state' has 9 numbers in .*wide.* and 8 in .*seven"):
        compute_statistics([seven, wide])
    with pytest.raises(DataError, match="no episode to compute statistics of"):
        compute_statistics([])
