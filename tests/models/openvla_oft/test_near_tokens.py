"""Imitation of a demonstrated bin and, less so, of its neighbours."""

import numpy as np
import pytest
import torch
from shallow_networks import shallow

from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import Demonstration, ImitationConfig, Imitator, OptimizerConfig
from vla_rl.learner.imitation_backend import make_sft_log_probs
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import tiny
from vla_rl.types import Observation


def small_policy() -> OpenVlaOft:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=1, action_dim=2)
    return OpenVlaOft.create(shallow(shape), seed=0)


def seen() -> Observation:
    return {"image": np.full((28, 28, 3), 90, np.uint8), "instruction": "turn left"}


def test_the_bins_around_a_token_are_weighed_by_a_gaussian() -> None:
    policy, middle = small_policy(), np.full((1, 1, 2), 0.0)
    tokens, batch = torch.from_numpy(policy.encode(middle)), policy.prepare([seen()])
    away = torch.arange(-8, 9)
    weights = torch.exp(-0.5 * (away / 1.5) ** 2)
    weights /= weights.sum()
    with torch.no_grad():
        each = [policy.log_probs(batch, tokens + int(step), torch.ones(1))[0] for step in away]
        expected = (weights[:, None, None] * torch.stack(each)).sum(0)
        torch.testing.assert_close(policy.near_log_probs(batch, tokens, 1.5), expected)
        alone = policy.log_probs(batch, tokens, torch.ones(1))[0]
        torch.testing.assert_close(policy.near_log_probs(batch, tokens, 0.01), alone)


async def test_an_imitator_with_a_label_width_learns_the_neighbours_too() -> None:
    policy = small_policy()
    config = ImitationConfig(optimizer=OptimizerConfig(lr=3e-3, warmup_steps=1), label_width=3.0)
    shown = Demonstration(observation=seen(), actions=np.full((1, 2), 0.5, np.float32), num_valid=1)
    async with DeviceLane(1) as lane:
        imitator = Imitator(policy, lane, config)
        for _ in range(40):
            await imitator.update([shown])
    tokens = torch.from_numpy(policy.encode(shown.actions[None]))
    with torch.no_grad():
        near, far = (
            policy.log_probs(policy.prepare([seen()]), tokens + step, torch.ones(1))[0].exp()
            for step in (2, 30)
        )
    assert (near > 0.05).all()
    assert (far < 0.01).all()


def test_a_label_width_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(ConfigError, match="label_width is 2"):
        make_sft_log_probs(MlpPolicy.__new__(MlpPolicy), 2.0)
    with pytest.raises(ConfigError, match="0 with several ranks"):
        ImitationConfig(label_width=2.0, ranks=2)
