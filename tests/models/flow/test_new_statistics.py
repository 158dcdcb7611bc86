"""A folder is given the statistics of the data that it is fine-tuned on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pi_folders
import pytest
import tiny_smolvla
import torch
from safetensors.torch import load_file

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.new_statistics import copy_with_statistics
from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.flow.smolvla_folder import SmolVlaParts, load_smolvla
from vla_rl.models.loading import CheckpointFormat, load_policy

ROWS = {
    "state": np.random.default_rng(0).normal(2.0, 0.5, (400, 6)),
    "action": np.random.default_rng(1).normal(-1.0, 3.0, (400, 5)),
}
STATISTICS = {
    name: {
        "mean": rows.mean(0).tolist(),
        "std": rows.std(0).tolist(),
        "min": rows.min(0).tolist(),
        "max": rows.max(0).tolist(),
        "q01": np.quantile(rows, 0.01, axis=0).tolist(),
        "q99": np.quantile(rows, 0.99, axis=0).tolist(),
    }
    for name, rows in ROWS.items()
}
OBSERVATION = {
    "image": np.zeros((64, 64, 3), np.uint8),
    "wrist_image": np.zeros((64, 64, 3), np.uint8),
    "state": ROWS["state"].mean(0).astype(np.float32),
    "instruction": "go",
}

FOLDERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], PiParts | SmolVlaParts]]] = {
    "openpi's pi0": (lambda path: pi_folders.write_openpi(path, "pi0"), load_pi),
    "openpi's pi0.5": (lambda path: pi_folders.write_openpi(path, "pi05"), load_pi),
    "LeRobot's pi0.5": (lambda path: pi_folders.write_lerobot(path, "pi05"), load_pi),
    "LeRobot's SmolVLA": (tiny_smolvla.write_smolvla, load_smolvla),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_states_and_actions_are_scaled_by_the_data(name: str, tmp_path: Path) -> None:
    write, load = FOLDERS[name]
    folder = write(tmp_path / "policy")
    parts = load(copy_with_statistics(folder, tmp_path / "copy", STATISTICS))
    assert (parts.settings.state_dim, parts.settings.action_dim) == (6, 5)
    assert parts.settings.action.kind == load(folder).settings.action.kind
    scaled = parts.processor.normalise_actions(ROWS["action"][None].astype(np.float32))
    assert abs(float(scaled.mean())) < 0.1
    back = parts.processor.restore_actions(scaled)
    assert np.allclose(back, ROWS["action"], atol=1e-4)
    # the mean of the data is near the middle of either kind
    inputs = parts.processor.prepare([OBSERVATION], torch.device("cpu"))
    assert float(inputs.state[0, :6].abs().max()) < 0.2
    assert float(inputs.state[0, 6:].abs().max()) == 0.0


def test_a_saved_folder_of_openpi_forgets_the_set_of_statistics_that_it_was_read_with(
    tmp_path: Path,
) -> None:
    asset = "physical-intelligence/libero"
    policy = load_policy(
        str(pi_folders.write_openpi(tmp_path / "policy", "pi0")),
        CheckpointFormat(norm_key=asset),
        "cpu",
    )
    policy.save(tmp_path / "saved")
    copy = copy_with_statistics(tmp_path / "saved", tmp_path / "copy", STATISTICS)
    assert load_policy(str(copy), CheckpointFormat(), "cpu").config.action_dim == 5


def test_weights_are_linked_and_stay_as_they_are(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    copy = copy_with_statistics(folder, tmp_path / "copy", STATISTICS)
    assert (copy / "model.safetensors").is_symlink()
    before = load_file(folder / "model.safetensors")
    written = load_smolvla(copy)
    found = written.layout.write_tensors(written.network)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_statistics_that_lerobot_left_out_are_added(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    for file, step in (
        ("policy_preprocessor.json", "normalizer_processor"),
        ("policy_postprocessor.json", "unnormalizer_processor"),
    ):
        pi_folders.change_step(folder, file, step, state_file=None)
    with pytest.raises(CheckpointError, match="has no statistics"):
        load_smolvla(folder)
    parts = load_smolvla(copy_with_statistics(folder, tmp_path / "copy", STATISTICS))
    assert parts.settings.action_dim == 5


def test_a_folder_without_processors_is_refused(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    (folder / "policy_postprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"policy_postprocessor\.json is missing"):
        copy_with_statistics(folder, tmp_path / "copy", STATISTICS)
