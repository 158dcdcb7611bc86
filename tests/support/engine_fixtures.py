"""Fixtures for the tests of engines and learners: small policies, observations and trajectories."""

from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.engines import DeviceLane
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)

CHUNK_SIZE, ACTION_DIM = 2, 2


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


@pytest.fixture
def policy() -> OpenVlaOft:
    """16 bins, chunks of 2 x 2, one small camera: 4 tokens a decision."""
    config = tiny(
        image_size=28,
        cameras=("image",),
        proprio=None,
        chunk_size=CHUNK_SIZE,
        action_dim=ACTION_DIM,
    )
    return OpenVlaOft.create(msgspec.structs.replace(config, num_bins=16), seed=0)


def observe(seed: int) -> Observation:
    rng = np.random.default_rng(seed)
    words = ("go left", "go to the right hand side now")[seed % 2]
    return {"image": rng.integers(0, 256, (28, 28, 3), dtype=np.uint8), "instruction": words}


@pytest.fixture
def make_observation() -> Callable[[int], Observation]:
    return observe


@pytest.fixture
def run_policy() -> Callable[..., Trajectory]:
    """A trajectory that the policy itself sampled.

    The last chunk ends after its first control step.
    """

    def run_policy(
        policy: OpenVlaOft, seed: int, num_steps: int, weight_version: int = 0
    ) -> Trajectory:
        sampling = Sampling(temperature=1.2)
        observations = [observe(derive_seed(seed, index) % 1000) for index in range(num_steps)]
        samplings = [
            msgspec.structs.replace(sampling, seed=derive_seed(seed, index))
            for index in range(num_steps)
        ]
        with torch.inference_mode():
            sampled = policy.sample(policy.prepare(observations), samplings)
            tokens, log_probs = sampled.tokens, sampled.log_probs
        actions = policy.decode(tokens.numpy())
        steps = tuple(
            Step(
                observation=observations[index],
                chunk=ActionChunk(
                    actions=actions[index],
                    tokens=tokens[index].numpy(),
                    log_probs=log_probs[index].numpy(),
                    weight_version=weight_version,
                ),
                rewards=np.zeros(CHUNK_SIZE if index + 1 < num_steps else 1, np.float32),
            )
            for index in range(num_steps)
        )
        episode = EpisodeSpec(
            episode_id=seed,
            group_id=0,
            member=seed,
            env=EnvSpec(id="vla_rl/none-v0"),
            task="none",
            seed=seed,
            policy_seed=seed,
            sampling=sampling,
        )
        return Trajectory(
            episode=episode,
            steps=steps,
            final_observation=observe(seed),
            stop_reason=StopReason.TIME_LIMIT,
        )

    return run_policy
