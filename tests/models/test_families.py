"""The family of a folder follows from its tensors; what the folder says of itself is compared with them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models import families
from vla_rl.models.families import FAMILIES, PolicyFamily, find_family, has_tensors, require_method
from vla_rl.models.loading import (
    CheckpointConfig,
    compute_digest,
    count_weight_bytes,
    load_openvla,
    load_policy,
)
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft, tiny

SHAPE = MlpConfig(state_size=3, action_low=(-1.0,), action_high=(1.0,), num_bins=3)


@pytest.fixture
def mlp_folder(tmp_path: Path) -> Path:
    MlpPolicy.create(SHAPE, seed=0).save(tmp_path / "mlp")
    return tmp_path / "mlp"


def test_a_policy_loads_by_its_tensors_alone(mlp_folder: Path) -> None:
    policy = load_policy(str(mlp_folder), CheckpointConfig(), "cpu")
    assert isinstance(policy, MlpPolicy)
    assert policy.describe() == (
        "MLP: sees a state of 3 numbers, decides 1 x 1 numbers, each one of 3 values"
    )
    (before,) = policy.prepare([{"state": torch.zeros(3).numpy()}])
    assert before.shape == (3,)


def test_a_folder_of_openvlas_is_none_of_the_tables(tmp_path: Path) -> None:
    OpenVlaOft.create(tiny(image_size=28), seed=0).save(tmp_path / "oft")
    assert find_family(tmp_path / "oft") is None
    assert isinstance(load_policy(str(tmp_path / "oft"), CheckpointConfig(), "cpu"), OpenVlaOft)


def test_no_two_families_claim_the_same_folder(mlp_folder: Path) -> None:
    names = set(MlpPolicy.create(SHAPE, seed=0).checkpoint_tensors())
    assert [each.name for each in FAMILIES if each.has_its_tensors(names)] == ["mlp"]


def test_settings_that_a_family_does_not_read_are_refused(mlp_folder: Path) -> None:
    for fields in ({"norm_key": "mine"}, {"policy_family": "openvla"}, {"cameras": ("a",)}):
        said: dict[str, Any] = fields
        with pytest.raises(ConfigError, match=f"{next(iter(said))} is .* those of mlp"):
            load_policy(str(mlp_folder), CheckpointConfig(**said), "cpu")


def test_a_recipe_for_openvla_names_the_family_that_it_was_given(mlp_folder: Path) -> None:
    with pytest.raises(ConfigError, match="of the family mlp, expected OpenVLA"):
        load_openvla(str(mlp_folder), CheckpointConfig(), "cpu")


def test_tensors_win_over_a_config_that_says_another_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = PolicyFamily(
        "old", has_tensors("state_proj.weight", without=["time_mlp.weight"]), "a:b",
        config_types=frozenset({"old"}),
    )  # fmt: skip
    new = replace(
        old, name="new", has_its_tensors=has_tensors("time_mlp.weight"), config_types=frozenset({"new"})
    )  # fmt: skip
    monkeypatch.setattr(families, "FAMILIES", (old, new))
    tensors = {"model.time_mlp.weight": torch.ones(1), "model.state_proj.weight": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"type": "new"}))
    with caplog.at_level(logging.WARNING):
        assert find_family(tmp_path) is new
        assert caplog.messages == []
        (tmp_path / "config.json").write_bytes(msgspec.json.encode({"type": "old"}))
        assert find_family(tmp_path) is new
    (message,) = caplog.messages
    assert "says old, but its tensors are those of new: it is read as new" in message


def test_one_line_says_so_however_often_a_folder_is_looked_at_and_linked_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "linked"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(msgspec.json.encode({"type": "pi0"}))
    weights = tmp_path / "one" / "model.safetensors"
    MlpPolicy.create(SHAPE, seed=0).save(tmp_path / "mlp")
    weights.write_bytes((tmp_path / "mlp" / "model.safetensors").read_bytes())
    (tmp_path / "linked" / "model.safetensors").symlink_to(weights)
    for name in ("one", "one", "linked"):
        assert find_family(tmp_path / name) is FAMILIES[0]
    (message,) = caplog.messages
    assert f"config.json of {tmp_path / 'one'} says pi0" in message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "pi0"}, "says pi0"),
        ({"type": "pi0_fast", "input_features": {}}, "says pi0_fast"),
        ({"action_horizon": 50, "action_dim": 32}, "is openpi's"),
    ],
)
def test_names_of_another_layout_are_no_matter_of_openvla(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save_file({"model.dit.norm.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    with pytest.raises(CheckpointError, match=rf"{said}, but .*model\.dit\.norm\.weight"):
        load_policy(str(tmp_path), CheckpointConfig(), "cpu")


@pytest.mark.parametrize(
    ("file", "advice"),
    [
        ("pretrained_model/config.json", r"name .*/pretrained_model"),
        ("params/_METADATA", "convert_jax_model_to_pytorch"),
    ],
)
def test_a_folder_whose_weights_are_elsewhere_says_where(
    file: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError, match=advice):
        load_policy(str(tmp_path), CheckpointConfig(), "cpu")


def test_a_mark_is_a_whole_name_or_its_end_behind_a_dot() -> None:
    has_time = has_tensors("time_mlp_in.weight")
    assert has_time({"time_mlp_in.weight"})
    assert has_time({"model.time_mlp_in.weight"})
    assert not has_time({"action_time_mlp_in.weight"})


def test_a_digest_covers_the_files_of_folders_below(mlp_folder: Path) -> None:
    format = CheckpointConfig()
    before = compute_digest(format.list_files(str(mlp_folder)))
    assert count_weight_bytes(format.list_files(str(mlp_folder))) > 4 * 64 * 64
    (mlp_folder / "assets").mkdir()
    (mlp_folder / "assets" / "norm_stats.json").write_text("{}")
    assert compute_digest(format.list_files(str(mlp_folder))) != before


def test_an_option_of_a_method_that_a_family_lacks_is_refused() -> None:
    policy = MlpPolicy.create(SHAPE, seed=0)
    assert require_method(policy, "copy", "copies")() is not policy
    with pytest.raises(ConfigError, match="lora_rank is set, but a MlpPolicy has no method"):
        require_method(policy, "adapted", "lora_rank")
