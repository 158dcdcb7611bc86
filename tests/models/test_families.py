"""The family of a folder follows from its tensors; the smallest one, an MLP, keeps what engines or learners rely on."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
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
from vla_rl.models.shipped import FLOW_BASE_POLICY
from vla_rl.types import Observation, Sampling

SMALLEST = MlpConfig(state_size=3, action_low=(-1.0,), action_high=(1.0,), num_bins=3)


@pytest.fixture
def mlp_folder(tmp_path: Path) -> Path:
    MlpPolicy.create(SMALLEST, seed=0).save(tmp_path / "mlp")
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
    names = set(MlpPolicy.create(SMALLEST, seed=0).checkpoint_tensors())
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
    MlpPolicy.create(SMALLEST, seed=0).save(tmp_path / "mlp")
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
        ("pretrained_model/config.json", r"1 policy below. Name it .*/pretrained_model$"),
        ("checkpoints/last/pretrained_model/config.json", r"Name it .*/last/pretrained_model$"),
        ("policy/config.json", "Name it .*/policy$"),
        ("update-000012/policy/config.json", "Name it .*/update-000012/policy$"),
        ("checkpoints/best/policy/config.json", "Name it .*/checkpoints/best/policy$"),
        ("agents/solver/policy/config.json", "Name it .*/agents/solver/policy$"),
        ("params/_METADATA", "convert_jax_model_to_pytorch"),
    ],
)
def test_a_folder_whose_weights_are_elsewhere_says_where(
    file: str, advice: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
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
    policy = MlpPolicy.create(SMALLEST, seed=0)
    assert require_method(policy, "copy", "copies")() is not policy
    with pytest.raises(ConfigError, match="lora_rank is set, but a MlpPolicy has no method"):
        require_method(policy, "adapted", "lora_rank")


SHAPE = MlpConfig(
    state_size=3,
    action_low=(-2.0, 0.0),
    action_high=(2.0, 1.0),
    num_bins=5,
    chunk_size=2,
    state_scale=(1.0, 2.0, 4.0),
)


def observe(seed: int) -> Observation:
    return {"state": np.random.default_rng(seed).normal(size=3).astype(np.float32)}


@pytest.fixture
def policy() -> MlpPolicy:
    return MlpPolicy.create(SHAPE, seed=0)


def test_what_was_sampled_has_the_log_probs_that_were_reported(policy: MlpPolicy) -> None:
    batch = policy.prepare([observe(seed) for seed in range(4)])
    sampled = policy.sample(batch, [Sampling(temperature=1.7, seed=seed) for seed in range(4)])
    tokens, log_probs = sampled.tokens, sampled.log_probs
    found, entropy = policy.log_probs(batch, tokens, torch.full((4,), 1.7))
    assert tokens.shape == log_probs.shape == (4, 4)
    torch.testing.assert_close(found, log_probs)
    # the last layer begins near 0, so every bin is about as likely as any other
    assert (entropy - np.log(5)).abs().max() < 1e-3


def test_bins_are_evenly_spaced_and_hold_both_ends(policy: MlpPolicy) -> None:
    tokens = np.array([[0, 0, 4, 4], [2, 1, 3, 2]])
    actions = policy.decode(tokens)
    np.testing.assert_allclose(actions, [[[-2.0, 0.0], [2.0, 1.0]], [[0.0, 0.25], [1.0, 0.5]]])
    assert actions.dtype == np.float32
    np.testing.assert_array_equal(policy.encode(actions), tokens)
    # the nearest bin; they are 1.0 and 0.25 apart
    np.testing.assert_array_equal(policy.encode(actions + 0.1), tokens)


def test_a_discrete_choice_is_one_dimension_with_a_bin_each() -> None:
    policy = MlpPolicy.create(
        MlpConfig(state_size=1, action_low=(0.0,), action_high=(3.0,), num_bins=4), seed=0
    )
    assert policy.decode(np.array([[0], [1], [2], [3]]))[:, 0, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_the_state_is_scaled_before_the_network_sees_it(policy: MlpPolicy) -> None:
    plain = MlpPolicy.create(
        MlpConfig(
            state_size=3, action_low=(-2.0, 0.0), action_high=(2.0, 1.0), num_bins=5, chunk_size=2
        ),
        seed=0,
    )
    torch.testing.assert_close(
        policy.network(torch.tensor([[3.0, 2.0, 8.0]])),
        plain.network(torch.tensor([[3.0, 1.0, 2.0]])),
    )


def test_a_saved_policy_loads_as_it_was(policy: MlpPolicy, tmp_path: Path) -> None:
    policy.save(tmp_path / "policy")
    again = MlpPolicy.load(tmp_path / "policy")
    assert again.config == policy.config
    batch = policy.prepare([observe(1)])
    assert torch.equal(again.network(batch), policy.network(batch))


def test_features_are_what_the_last_hidden_layer_says(policy: MlpPolicy) -> None:
    batch = policy.prepare([observe(1), observe(2)])
    features = policy.features(batch)
    assert features.shape == (2, policy.feature_size)
    torch.testing.assert_close(policy.network.head(features).view(2, 4, 5), policy.network(batch))


def test_a_folder_that_is_no_checkpoint_and_tensors_of_another_shape_are_refused(
    policy: MlpPolicy, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="is not an MLP policy's checkpoint"):
        MlpPolicy.load(tmp_path)
    with pytest.raises(CheckpointError, match="head"):
        policy.load_checkpoint_tensors({"head.bias": torch.zeros(1)})


def test_a_state_of_another_length_is_refused(policy: MlpPolicy) -> None:
    with pytest.raises(ValueError, match=r"observation\['state'\] is \[2\], expected \[3\]"):
        policy.prepare([{"state": np.zeros(2, np.float32)}])
    with pytest.raises(ValueError, match="expected"):
        policy.encode(np.zeros((1, 3, 2), np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action_high": (2.0,)}, "expected 2 numbers"),
        ({"action_high": (2.0, 0.0)}, "above action_low"),
        ({"state_scale": (1.0, 1.0)}, "3 numbers above 0"),
    ],
)
def test_shapes_that_cannot_be_are_refused(change: dict[str, object], message: str) -> None:
    fields = {
        "state_size": 3,
        "action_low": (-2.0, 0.0),
        "action_high": (2.0, 1.0),
        "num_bins": 5,
        **change,
    }
    with pytest.raises(ConfigError, match=message):
        MlpConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["mlp", "openvla_oft", "flow"])
def test_an_observation_that_is_one_array_is_named_by_every_family(family: str) -> None:
    policy: Any = {
        "mlp": lambda: MlpPolicy.create(
            MlpConfig(state_size=4, action_low=(0.0,), action_high=(1.0,), num_bins=2), seed=0
        ),
        "openvla_oft": lambda: OpenVlaOft.create(
            tiny(image_size=28, cameras=("image",), proprio=None, action_dim=1), seed=0
        ),
        "flow": lambda: load_policy(str(FLOW_BASE_POLICY), CheckpointConfig(), "cpu"),
    }[family]()
    with pytest.raises(ValueError, match=r"the observation is float32 \[4\], expected a dict"):
        policy.prepare([np.zeros(4, np.float32)])
