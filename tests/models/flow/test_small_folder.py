"""Small flow policies are saved whole, load again, and refuse observations and folders that do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_flow import TINY, observe, tiny_policy

from vla_rl.errors import CheckpointError
from vla_rl.models.families import find_family
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.types import Observation, Sampling


def decide(policy: FlowPolicy) -> torch.Tensor:
    with torch.inference_mode():
        return policy.sample(
            policy.prepare([observe(0), observe(2)]), [Sampling(seed=3)] * 2
        ).tokens


def test_a_saved_policy_decides_as_before_and_is_recognised_by_its_tensors(tmp_path: Path) -> None:
    policy = tiny_policy(num_steps=3, noise_level=0.3)
    policy.save(tmp_path / "policy")
    family = find_family(tmp_path / "policy")
    assert family is not None
    assert family.name == "small_flow"
    loaded = load_policy(str(tmp_path / "policy"), CheckpointConfig(), "cpu")
    assert isinstance(loaded, FlowPolicy)
    assert loaded.config == policy.config
    assert torch.equal(decide(loaded), decide(policy))
    loaded.save(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        first, second = ((tmp_path / each / name).read_bytes() for each in ("policy", "again"))
        assert first == second


def test_a_folder_can_be_loaded_with_another_chain(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path / "policy")
    sampling = FlowSampling(num_steps=7, noise_level=0.2)
    assert load_small_flow(tmp_path / "policy", sampling).config.sampling == sampling


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampling": {"num_steps": 0}}, "num_steps"),
        ({"sampling": {"noise_level": -1.0}}, "noise_level"),
        ({"model_type": "pi0"}, "model_type is 'pi0'"),
        ({"policy": {}}, "actions"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    tiny_policy().save(tmp_path / "policy")
    path = tmp_path / "policy" / "config.json"
    (tmp_path / "policy" / "vla_rl_manifest.json").unlink(missing_ok=True)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=message):
        load_small_flow(tmp_path / "policy")


def test_tensors_of_other_sizes_are_refused() -> None:
    policy = tiny_policy()
    tensors = policy.checkpoint_tensors()
    tensors["action_in.weight"] = torch.zeros(24, 7)
    with pytest.raises(CheckpointError, match=r"action_in\.weight"):
        policy.load_checkpoint_tensors(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, r"\['image'\] is NoneType, expected uint8 \[16, 16, 3\]"),
        ({"image": np.zeros((32, 32, 3), np.uint8)}, r"uint8 \[32, 32, 3\], expected uint8 \[16"),
        ({"image": np.zeros((16, 16, 3), np.float32)}, r"float32 \[16, 16, 3\]"),
        ({"wrist_image": None}, "cameras image, wrist_image at 16 pixels"),
        (
            {"state": np.zeros(3, np.float32)},
            r"\['state'\] is float32 \[3\], expected float32 \[2\]",
        ),
        ({"instruction": " "}, "expected the task in 1 to 32 words"),
        ({"instruction": "word " * 33}, "expected the task in 1 to 32 words"),
    ],
)
def test_observations_that_do_not_fit_are_refused(change: Observation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_policy().prepare([{**observe(0), **change}])


def test_a_camera_that_is_not_optional_may_not_be_missing() -> None:
    seen = observe(0)
    del seen["image"]
    with pytest.raises(ValueError, match=r"\['image'\] is NoneType"):
        tiny_policy().prepare([seen])


def test_actions_are_normalised_by_their_statistics() -> None:
    policy = tiny_policy()
    actions = np.array([[[2.0, -1.0, 0.5]] * 4], np.float32)
    numbers = policy.encode(actions)
    np.testing.assert_allclose(numbers.reshape(4, 3)[0], [1.0, -1.0, 0.5])
    np.testing.assert_allclose(policy.decode(numbers), actions)
    assert TINY.state is not None
    state = policy.prepare([{**observe(0), "state": np.array([2.5, -1.0], np.float32)}]).state
    np.testing.assert_allclose(state.numpy(), [[1.0, -1.0]])


def test_words_whose_order_or_spelling_differs_are_different_tokens() -> None:
    policy = tiny_policy()
    texts = ["put the red mug", "put the mug red", "Put the  red mug", "put the red cup"]
    rows = [
        policy.prepare([{**observe(0), "instruction": text}]).tokens[0].tolist() for text in texts
    ]
    assert rows[0] == rows[2]
    assert rows[0] != rows[1]
    assert rows[0] != rows[3]
