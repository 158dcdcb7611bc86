"""The MLP policy keeps what engines and learners rely on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.shipped import FLOW_BASE_POLICY
from vla_rl.types import Observation, Sampling

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
