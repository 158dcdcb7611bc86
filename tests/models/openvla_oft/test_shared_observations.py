"""Decisions on the same observation pass through the network once."""

import numpy as np
import pytest
import torch

from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import tiny
from vla_rl.types import Observation, Sampling


@pytest.fixture(scope="module")
def policy() -> OpenVlaOft:
    shape = tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=2, action_dim=3)
    return OpenVlaOft.create(shape, seed=0)


def seen(number: int, instruction: str = "turn left") -> Observation:
    rng = np.random.default_rng(number)
    image = rng.integers(0, 256, (28, 28, 3), dtype=np.uint8)
    return {"image": image, "instruction": instruction}


def test_copies_of_an_observation_are_one_row_of_the_batch(policy: OpenVlaOft) -> None:
    batch = policy.prepare([seen(0), seen(1), seen(0), seen(1), seen(0, "turn right"), seen(0)])
    assert batch.images.shape[0] == 3
    assert batch.rows is not None
    assert batch.rows.tolist() == [0, 1, 0, 1, 2, 0]
    assert policy.prepare([seen(0), seen(1), seen(0)]).rows is None


def test_log_probs_and_gradients_are_those_of_one_row_each(policy: OpenVlaOft) -> None:
    observations = [seen(0), seen(1), seen(0), seen(0)]
    tokens = torch.from_numpy(policy.encode(np.linspace(-1, 1, 24).reshape(4, 2, 3)))
    ones = torch.ones(4)
    network = policy.network

    def gradient() -> torch.Tensor:
        found = torch.cat(
            [each.grad.flatten() for each in network.parameters() if each.grad is not None]
        )
        network.zero_grad()
        return found

    together, entropies = policy.log_probs(policy.prepare(observations), tokens, ones)
    together.sum().backward()
    shared = gradient()
    for row, observation in enumerate(observations):
        alone, entropy = policy.log_probs(
            policy.prepare([observation]), tokens[row : row + 1], ones[:1]
        )
        torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entropies[row], entropy[0], atol=1e-4, rtol=1e-4)
        alone.sum().backward()
    torch.testing.assert_close(shared, gradient(), atol=1e-3, rtol=1e-3)


def test_decisions_that_share_an_observation_draw_for_themselves(policy: OpenVlaOft) -> None:
    batch = policy.prepare([seen(0)] * 4)
    samplings = [Sampling(temperature=1.0, seed=number) for number in range(4)]
    tokens, log_probs = policy.sample(batch, samplings)
    assert tokens.shape == log_probs.shape == (4, 6)
    assert len({tuple(row) for row in tokens.tolist()}) == 4
    assert policy.features(batch).shape == (4, policy.feature_size)
