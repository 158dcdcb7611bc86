"""Folders that would play nothing are refused by name, and whole ones are not."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pi_folders
import pytest
import torch
from broken_folders import BROKEN, Break, load_for_robot

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.pi_folder import load_pi
from vla_rl.models.flow.robot_checks import check_gripper, check_widths

CONFIG, PREPROCESSOR, POSTPROCESSOR = (
    "config.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
)
WRITERS = {"openpi": pi_folders.write_openpi, "lerobot": pi_folders.write_lerobot}


@pytest.fixture(params=[(project, kind) for project in WRITERS for kind in ("pi0", "pi05")])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    project, kind = request.param
    return WRITERS[project](tmp_path / "policy", kind)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_of_lerobot_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    change, message = BROKEN[fault]
    load_for_robot(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load_for_robot(folder)


def test_kinds_that_two_files_state_differently_are_refused(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    other = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    pi_folders.change_json(folder / CONFIG, normalization_mapping=other)
    with pytest.raises(CheckpointError, match=r"kind of normalisation of observation\.state"):
        load_pi(folder)


def test_a_folder_that_names_no_kind_is_refused(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    pi_folders.change_step(folder, PREPROCESSOR, "normalizer_processor", norm_map={})
    with pytest.raises(CheckpointError, match=r"normalisation of the .*state is not named"):
        load_pi(folder)


def statistics_file(folder: Path) -> Path:
    return folder / "assets" / "physical-intelligence" / "libero" / "norm_stats.json"


def change_openpi(folder: Path, vectors: dict[str, float] | None) -> None:
    """Replace vectors of both features by one number, or remove them all."""
    path = statistics_file(folder)
    held = json.loads(path.read_text())["norm_stats"]
    for feature in held.values():
        width = len(feature["mean"])
        for name, value in (vectors or {}).items():
            feature[name] = [value] * width
    path.write_text(json.dumps({"norm_stats": held if vectors is not None else {}}))


def test_statistics_of_padded_vectors_show_the_robots_width(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi05")
    path = statistics_file(folder)
    held = json.loads(path.read_text())
    for feature in held["norm_stats"].values():
        for name, vector in feature.items():
            # quantiles of zeros, as openpi's histograms give them
            padding = {"q01": -1e-10, "q99": 1e-10}.get(name, 0.0)
            feature[name] = vector + [padding] * (32 - len(vector))
    path.write_text(json.dumps(held))
    settings = load_pi(folder).settings
    assert (settings.action_dim, settings.state_dim) == (7, 8)
    check_widths(settings, 7, 8)


def drop_openpi(folder: Path, names: tuple[str, ...]) -> None:
    path = statistics_file(folder)
    held = json.loads(path.read_text())
    for feature in held["norm_stats"].values():
        for name in names:
            del feature[name]
    path.write_text(json.dumps(held))


BROKEN_OPENPI: dict[str, tuple[Break, str]] = {
    "statistics absent": (lambda folder: statistics_file(folder).unlink(), "has none among its"),
    "statistics empty": (lambda folder: change_openpi(folder, None), "state has no statistics"),
    "statistics initial": (
        lambda folder: change_openpi(folder, {"q01": 0.0, "q99": 1.0}),
        "at their initial values",
    ),
    "statistics constant": (
        lambda folder: change_openpi(folder, {"q01": 0.2, "q99": 0.2}),
        "constant in all",
    ),
    "kind contradicts the fields": (
        lambda folder: drop_openpi(folder, ("q01", "q99")),
        "normalised by QUANTILES, but its statistics lack q01 and q99",
    ),
    "prefix": (
        lambda folder: pi_folders.rename_tensors(folder / "model.safetensors", "", "model."),
        r"begin with 'model\.', expected ''",
    ),
    "missing": (
        lambda folder: pi_folders.change_tensors(
            folder / "model.safetensors", action_out_proj__bias=None
        ),
        r"1 missing: action_out_proj\.bias",
    ),
    "surplus": (
        lambda folder: pi_folders.change_tensors(
            folder / "model.safetensors", value_head=torch.ones(2)
        ),
        "1 unknown: value_head",
    ),
    "both models": (
        lambda folder: pi_folders.change_tensors(
            folder / "model.safetensors", state_proj__weight=torch.ones(2, 2)
        ),
        "tensors of both pi0 and pi0.5",
    ),
    "other numbers": (
        lambda folder: pi_folders.change_tensors(
            folder / "model.safetensors", action_out_proj__bias=torch.full((32,), torch.nan)
        ),
        "not finite",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_OPENPI)
def test_a_broken_folder_of_openpi_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi05")
    change, message = BROKEN_OPENPI[fault]
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load_pi(folder)


def test_more_rows_than_a_chunk_has_are_refused_where_they_are_asked_for(folder: Path) -> None:
    assert load_pi(folder, num_executed=3).settings.num_executed == 3
    with pytest.raises(CheckpointError, match="6 rows of each chunk"):
        load_pi(folder, num_executed=6)


def test_a_folder_of_transformers_is_refused_by_name(tmp_path: Path) -> None:
    folder = pi_folders.write_openpi(tmp_path / "policy", "pi0")
    (folder / CONFIG).write_text('{"model_type": "pi0"}')
    with pytest.raises(CheckpointError, match="transformers' model 'pi0'"):
        load_pi(folder)


def test_processors_that_differ_in_the_statistics_of_actions_are_refused(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    pi_folders.change_tensors(
        folder / pi_folders.UNNORMALIZER, action__mean=torch.linspace(-1, 1, 7)
    )
    with pytest.raises(CheckpointError, match="the mean of action"):
        load_pi(folder)


def test_a_state_file_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    pi_folders.change_step(
        folder, PREPROCESSOR, "normalizer_processor", state_file="../other.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"state_file is '\.\./other"):
        load_pi(folder)


def test_a_robot_of_another_width_is_refused(tmp_path: Path) -> None:
    settings = load_pi(pi_folders.write_lerobot(tmp_path / "policy", "pi0")).settings
    check_widths(settings, 7, 8)
    with pytest.raises(CheckpointError, match="action has 7 numbers, expected the robot's 4"):
        check_widths(settings, 4, 8)
    with pytest.raises(CheckpointError, match="state has 8 numbers, but the robot's has 39"):
        check_widths(settings, 7, 39)


def test_the_gripper_is_compared_with_the_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = load_pi(pi_folders.write_lerobot(tmp_path / "policy", "pi05")).settings
    statistics = settings.action.statistics
    low, high = (float(statistics[name][-1]) for name in ("q01", "q99"))
    data = np.zeros((400, 7))
    data[:, -1] = np.linspace(low, high, 400)
    check_gripper(settings, data)
    assert not caplog.records
    with pytest.raises(CheckpointError, match="its range is another one"):
        check_gripper(settings, data * 0.1)
    if abs(low + high) > 0.3 * (high - low):
        with pytest.raises(CheckpointError, match="its sign is the opposite one"):
            check_gripper(settings, -data)
    caplog.set_level(logging.WARNING)
    check_gripper(settings, None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "not checked: there is no data" in line


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        (CONFIG, {"input_features": [1]}),
        (CONFIG, {"chunk_size": "five"}),
        (CONFIG, {"output_features": {"action": 7}}),
        (CONFIG, {"max_action_dim": 4}),
        (CONFIG, {"use_relative_actions": True}),
        (PREPROCESSOR, {"steps": {}}),
        (PREPROCESSOR, {"steps": [{"registry_name": 4}]}),
        (POSTPROCESSOR, {"steps": []}),
    ],
)
def test_a_file_that_holds_something_else_is_one_clear_error(
    tmp_path: Path, file: str, fields: dict[str, Any]
) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    pi_folders.change_json(folder / file, **fields)
    with pytest.raises(CheckpointError, match=rf"{file}.*(expected|is not)"):
        load_pi(folder)
