"""The policy's own vision tower as an encoder: what it sees, and that it does not move while the
policy learns.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla_rl.algorithms import EmbeddingConfig, ObservationEncoder
from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.trajectory_encoders import PolicyTowerEncoder, trajectory_encoder
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

THREE = EmbeddingConfig(encoder="policy", num_frames=3)


@pytest.fixture
def policy() -> OpenVlaOft:
    return OpenVlaOft.create(tiny(image_size=28, cameras=("image",), proprio=None), seed=0)


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(1) as lane:
        yield lane


def playing(seed: int, num: int = 5, size: int = 28) -> Trajectory:
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    seen: list[dict[str, Any]] = [
        {"image": frame, "instruction": "turn on the stove"} for frame in frames
    ]
    nothing = np.zeros(1, np.float32)
    chunk = ActionChunk(
        actions=nothing[None], tokens=np.zeros(1, np.int64), log_probs=nothing, weight_version=0
    )
    spec = EpisodeSpec(
        episode_id=seed,
        group_id=0,
        member=0,
        env=EnvSpec(id="toy"),
        task="t",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec,
        steps=tuple(Step(observation=each, chunk=chunk, rewards=nothing) for each in seen[:-1]),
        final_observation=seen[-1],
        stop_reason=StopReason.TIME_LIMIT,
    )


async def test_a_moment_is_the_mean_over_the_patches_of_its_observation(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    trajectory = playing(1)
    embeddings = await PolicyTowerEncoder(THREE, policy, lane).embed([trajectory])
    # observations 0, 2 and 4 of five
    chosen = [
        trajectory.steps[0].observation,
        trajectory.steps[2].observation,
        trajectory.final_observation,
    ]
    with torch.no_grad():
        patches = policy.network.vision_backbone(policy.prepare(chosen).images)
    np.testing.assert_allclose(embeddings[0], patches.mean(dim=1).numpy(), atol=1e-5)


def test_the_copy_may_compute_on_another_device_than_the_policy(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    encoder = PolicyTowerEncoder(THREE, policy, lane, torch.device("meta"))
    assert {each.device.type for each in encoder._tower.parameters()} == {"meta"}
    assert {each.device.type for each in policy.network.parameters()} == {"cpu"}


async def test_embeddings_stay_comparable_while_the_policy_learns(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    encoder = trajectory_encoder(THREE, policy, lane)
    before = await encoder.embed([playing(1)])
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(1.0)
    assert (await encoder.embed([playing(1)])).tolist() == before.tolist()


async def test_each_trajectory_is_embedded_by_its_own_observations(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    together = await PolicyTowerEncoder(THREE, policy, lane).embed([playing(1), playing(2, num=9)])
    alone = await PolicyTowerEncoder(THREE, policy, lane).embed([playing(2, num=9)])
    np.testing.assert_allclose(together[1], alone[0], atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 1e-3


async def test_an_observation_that_the_policy_cannot_see_is_refused_by_its_episode(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    blind = playing(6)
    for step in blind.steps:
        del step.observation["image"]
    with pytest.raises(ValueError, match="episode 6 cannot be embedded"):
        await PolicyTowerEncoder(THREE, policy, lane).embed([blind])


def test_a_tower_that_is_damaged_or_not_finite_is_refused(
    policy: OpenVlaOft, lane: DeviceLane, tmp_path: Path
) -> None:
    encoder = PolicyTowerEncoder(THREE, policy, lane)
    encoder.save(tmp_path / "tower")
    encoder.load(tmp_path / "tower")
    tensors = load_file(tmp_path / "tower")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "nan")
    with pytest.raises(CheckpointError, match="not finite"):
        encoder.load(tmp_path / "nan")
    (tmp_path / "cut").write_bytes((tmp_path / "tower").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        encoder.load(tmp_path / "cut")


def test_a_policy_without_eyes_is_refused(policy: OpenVlaOft, lane: DeviceLane) -> None:
    del policy.network.vision_backbone
    with pytest.raises(
        ConfigError, match="OpenVlaOft has no vision tower; expected 'pixels', 'state' or 'vjepa2'"
    ):
        trajectory_encoder(THREE, policy, lane)


def test_pixels_and_state_need_no_network(policy: OpenVlaOft, lane: DeviceLane) -> None:
    for encoder in ("pixels", "state"):
        assert isinstance(
            trajectory_encoder(EmbeddingConfig(encoder=encoder), policy, lane), ObservationEncoder
        )
