"""Folders of pi0, pi0.5 as openpi or LeRobot writes them: read, refused by name if their policy would do
nothing, written back bit by bit."""

import json
import logging
from pathlib import Path
from typing import Any

import golden_flow
import numpy as np
import pi_folders
import pytest
import torch
from pi_folders import BROKEN, Break, load_for_robot
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.pi import PiKind, PiNetwork
from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.flow.robot_checks import check_gripper, check_widths
from vla_rl.models.loading import load_policy
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.small_files import save_folder
from vla_rl.types import Observation

KINDS: tuple[PiKind, ...] = ("pi0", "pi05")

WRITERS = {"openpi": pi_folders.write_openpi, "lerobot": pi_folders.write_lerobot}

CONFIG, PREPROCESSOR, POSTPROCESSOR = (
    "config.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
)

OBSERVATION: Observation = {
    "image": np.full((64, 48, 3), 200, np.uint8),
    "wrist_image": np.full((64, 64, 3), 9, np.uint8),
    "state": np.linspace(-0.5, 0.5, 8, dtype=np.float32),
    "instruction": "pick up the bowl",
}


@pytest.fixture(params=[(project, kind) for project in WRITERS for kind in KINDS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    project, kind = request.param
    return WRITERS[project](tmp_path / "policy", kind)


def act(parts: PiParts) -> torch.Tensor:
    inputs = parts.processor.prepare([OBSERVATION], torch.device("cpu"))
    with torch.no_grad():
        prefix = parts.network.embed_prefix(inputs)
        return parts.network.velocity(prefix, torch.ones(1, 5, 32), torch.ones(1))


def test_a_folder_comes_back_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    parts = load_pi(folder)
    save_folder(tmp_path / "saved", parts.layout.write_tensors(parts.network), parts.layout.files)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    small = [
        path for path in folder.rglob("*") if path.is_file() and path.name != "model.safetensors"
    ]
    assert len(small) >= 3
    for path in small:
        assert (tmp_path / "saved" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    torch.testing.assert_close(act(parts), act(load_pi(tmp_path / "saved")), rtol=0, atol=1e-6)


def test_both_layouts_of_the_same_weights_move_alike(tmp_path: Path) -> None:
    """The golden weights follow from names, so they are given the same here."""
    first = load_pi(pi_folders.write_openpi(tmp_path / "openpi", "pi0"))
    second = load_pi(pi_folders.write_lerobot(tmp_path / "lerobot", "pi0"))
    second.network.load_state_dict(first.network.state_dict())
    inputs = first.processor.prepare([OBSERVATION], torch.device("cpu"))
    found = [
        parts.network.velocity(
            parts.network.embed_prefix(inputs), torch.ones(1, 5, 32), torch.ones(1)
        )
        for parts in (first, second)
    ]
    # weights that lie elsewhere in memory are added in another order
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_the_tensors_say_which_model_it_is_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    pi_folders.change_json(folder / CONFIG, type="pi0")
    pi_folders.change_step(folder, PREPROCESSOR, "tokenizer_processor", max_length=48)
    assert load_pi(folder).processor.tokenizer.max_length == 200
    policy = load_policy(str(folder), AS_STORED, "cpu")
    assert isinstance(policy.network, PiNetwork)
    assert policy.network.size.kind == "pi05"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "says pi0, but its tensors are those of pi05" in line


def test_a_table_that_is_stored_as_the_head_alone_is_read_and_written_so(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    table = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    pi_folders.change_tensors(folder / "model.safetensors", **{table: None})
    parts = load_pi(folder)
    written = parts.layout.write_tensors(parts.network)
    assert table not in written
    assert "model.paligemma_with_expert.paligemma.lm_head.weight" in written


def test_names_and_shapes_that_are_saved_are_those_of_the_other_project(folder: Path) -> None:
    parts = load_pi(folder)
    project, kind = parts.settings.project, parts.network.size.kind
    golden = golden_flow.golden_names(kind if project == "lerobot" else f"{kind}_openpi")
    written = {
        name.removeprefix("model." if project == "lerobot" else ""): list(tensor.shape)
        for name, tensor in parts.layout.write_tensors(parts.network).items()
        if "lm_head" not in name
    }
    assert written.keys() == golden.keys()
    # the golden files of LeRobot have actions of 7 numbers, its folders pad them to 32
    differing = {name for name in golden if written[name] != golden[name]}
    assert all("_proj" in name and name.startswith(("action_", "state_")) for name in differing)


def test_cameras_follow_from_their_names_or_are_named(tmp_path: Path) -> None:
    openpi = pi_folders.write_openpi(tmp_path / "openpi", "pi0")
    assert load_pi(openpi).processor.cameras == ("image", "wrist_image", "none")
    assert load_pi(openpi, cameras=["front", "none", "none"]).processor.cameras[0] == "front"
    with pytest.raises(ConfigError, match="one observation key for each camera"):
        load_pi(openpi, cameras=["image"])
    with pytest.raises(ConfigError, match="would see nothing"):
        load_pi(openpi, cameras=["none"] * 3)


def test_a_camera_that_was_renamed_is_found_under_its_first_name(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    names = {"observation.images.front": "observation.images.image"}
    pi_folders.change_step(folder, PREPROCESSOR, "rename_observations_processor", rename_map=names)
    assert load_pi(folder).processor.cameras == ("front", "wrist_image")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": np.zeros(7, np.float32)}, r"observation\['state'\] is float32 \[7\]"),
        ({"image": np.zeros((4, 4), np.uint8)}, r"observation\['image'\] is uint8 \[4, 4\]"),
        ({"wrist_image": None}, r"observation\['wrist_image'\] is NoneType"),
        ({"instruction": 3}, "instruction.* is int"),
    ],
)
def test_an_observation_that_does_not_suit_the_policy_is_named(
    tmp_path: Path, changes: Observation, message: str
) -> None:
    parts = load_pi(pi_folders.write_lerobot(tmp_path / "policy", "pi0"))
    with pytest.raises(ValueError, match=message):
        parts.processor.prepare([OBSERVATION | changes], torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_of_openpi_is_kept_tensor_by_tensor(kind: PiKind, tmp_path: Path) -> None:
    """openpi rounds PaliGemma and the expert, but for norms and the first layer of the tower."""
    folder = pi_folders.write_openpi(tmp_path / "policy", kind)
    whole = act(load_pi(folder))
    kept = ("patch_embedding", "position_embedding", "layernorm", "model.norm")
    tensors = load_file(folder / "model.safetensors")
    rounded = {
        name: tensor.bfloat16()
        if name.startswith("paligemma_with_expert") and not any(part in name for part in kept)
        else tensor
        for name, tensor in tensors.items()
    }
    # the tower's last norm is no norm of Gemma's, and is rounded with its layers
    rounded |= {name: each.bfloat16() for name, each in rounded.items() if "post_layernorm" in name}
    save_file(rounded, folder / "model.safetensors")
    parts = load_pi(folder)
    written = parts.layout.write_tensors(parts.network)
    assert {name: each.dtype for name, each in written.items()} == {
        name: each.dtype for name, each in rounded.items()
    }
    assert all(torch.equal(written[name], rounded[name]) for name in written)
    assert (act(parts) - whole).abs().max() < 0.02


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
