"""Encoders of trajectories, V-JEPA 2 or the policy's own vision tower: what they see, what they compute."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_batches import trajectory_of, with_frames, with_states

from vla_rl.algorithms import EmbeddingConfig, ObservationEncoder, TrajectoryEncoder, VJepa2Config
from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.trajectory_encoders import PolicyTowerEncoder, trajectory_encoder
from vla_rl.models.vjepa2 import VJepa2Encoder, load_encoder, preprocess, sample_frames
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory


def numbered(num: int) -> list[np.ndarray]:
    return [np.full((2, 2, 3), index, np.uint8) for index in range(num)]


def chosen(num: int, num_frames: int, short_videos: str = "cyclic") -> list[int]:
    return sample_frames(numbered(num), num_frames, short_videos)[:, 0, 0, 0].tolist()


def test_a_long_video_is_sampled_evenly_and_rounded_down() -> None:
    # j * 9 / 3 = 0, 3, 6, 9;  j * 6 / 3 = 0, 2, 4, 6;  j * 4 / 3 = 0, 1.33, 2.67, 4
    assert chosen(10, 4) == [0, 3, 6, 9]
    assert chosen(7, 4) == [0, 2, 4, 6]
    assert chosen(5, 4) == [0, 1, 2, 4]
    assert chosen(4, 4) == [0, 1, 2, 3]


def test_a_short_video_starts_over_or_is_stretched() -> None:
    assert chosen(3, 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    # j * 2 / 7 = 0, .29, .57, .86, 1.14, 1.43, 1.71, 2
    assert chosen(3, 8, "stretched") == [0, 0, 0, 0, 1, 1, 1, 2]
    assert chosen(1, 4, "stretched") == [0, 0, 0, 0]


def test_a_video_of_zero_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="the video has no frame"):
        sample_frames([], 64, "cyclic")


@pytest.mark.parametrize(
    ("height", "width", "image_size"),
    [(84, 84, 32), (84, 84, 96), (128, 100, 64), (60, 90, 112), (64, 77, 80), (256, 256, 384)],
)
def test_frames_are_prepared_as_the_processor_of_transformers_does(
    height: int, width: int, image_size: int
) -> None:
    from transformers.models.vjepa2.video_processing_vjepa2 import VJEPA2VideoProcessor

    frames = torch.from_numpy(
        np.random.default_rng(0).integers(0, 256, (2, height, width, 3), dtype=np.uint8)
    )
    processor = VJEPA2VideoProcessor(crop_size=image_size)
    theirs = processor(frames.permute(0, 3, 1, 2), return_tensors="pt", do_sample_frames=False)[
        "pixel_values_videos"
    ]
    assert torch.equal(preprocess(frames, image_size), theirs[0])


def test_a_white_frame_has_the_number_that_imagenet_gives_it() -> None:
    white = preprocess(torch.full((1, 4, 4, 3), 255, dtype=torch.uint8), 16)
    # (1 - mean) / std, channel by channel
    expected = torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    torch.testing.assert_close(white[0, :, 8, 8], expected)


CPU = torch.device("cpu")


def config_of(folder: str, **fields: Any) -> VJepa2Config:
    return VJepa2Config(
        folder=folder, num_frames=8, image_size=32, **{"precision": "float32", **fields}
    )


def encoder_of(folder: str, lane: DeviceLane, **fields: Any) -> VJepa2Encoder:
    return VJepa2Encoder(config_of(folder, **fields), "image", lane, CPU)


async def test_an_embedding_is_the_mean_of_what_transformers_computes(
    vjepa2_folder: str, lane: DeviceLane
) -> None:
    from transformers import VJEPA2Model

    trajectories = [with_frames(12, seed=0), with_frames(5, seed=1)]
    embeddings = await encoder_of(vjepa2_folder, lane).embed(trajectories)
    model = VJEPA2Model.from_pretrained(vjepa2_folder, crop_size=32, frames_per_clip=8).eval()
    for trajectory, embedding in zip(trajectories, embeddings, strict=True):
        frames = [
            *(step.observation["image"] for step in trajectory.steps),
            trajectory.final_observation["image"],
        ]
        pixels = preprocess(torch.from_numpy(sample_frames(frames, 8, "cyclic")), 32)[None]
        with torch.no_grad():
            tokens = model(pixels, skip_predictor=True).last_hidden_state
        # 8 frames are 4 tubelets of 2 x 2 patches
        assert tokens.shape == (1, 16, 48)
        np.testing.assert_allclose(embedding[0], tokens[0].mean(0).numpy(), atol=1e-6)


async def test_moments_are_means_over_stretches_of_time(
    vjepa2_folder: str, lane: DeviceLane
) -> None:
    trajectories = [with_frames(9, seed=3)]
    whole = await encoder_of(vjepa2_folder, lane, short_videos="stretched").embed(trajectories)
    parts = await encoder_of(vjepa2_folder, lane, short_videos="stretched", num_moments=4).embed(
        trajectories
    )
    assert parts.shape == (1, 4, 48)
    np.testing.assert_allclose(parts.mean(axis=1), whole[:, 0], atol=1e-6)
    assert np.abs(parts[0, 0] - parts[0, 3]).max() > 1e-4


async def test_the_number_of_videos_in_a_batch_changes_memory_and_not_the_embedding(
    vjepa2_folder: str, lane: DeviceLane
) -> None:
    trajectories = [with_frames(4 + k, size=24 + k, seed=k, episode_id=k) for k in range(5)]
    one, two = [
        await encoder_of(vjepa2_folder, lane, videos_per_batch=size).embed(trajectories)
        for size in (1, 2)
    ]
    assert one.shape == (5, 1, 48)
    np.testing.assert_allclose(one, two, atol=1e-5)
    assert len({row.tobytes() for row in one}) == 5


async def test_weights_are_read_at_the_first_trajectory_and_kept(
    vjepa2_folder: str, lane: DeviceLane, tmp_path: Path
) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(vjepa2_folder, folder)
    encoder = encoder_of(str(folder), lane)
    assert (await encoder.embed([])).shape == (0, 0, 0)
    (folder / "model.safetensors").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await encoder.embed([with_frames(3)])
    (tmp_path / "away").rename(folder / "model.safetensors")
    first = await encoder.embed([with_frames(3)])
    (folder / "model.safetensors").unlink()
    assert (await encoder.embed([with_frames(3)])).tolist() == first.tolist()


class Travelling(VJepa2Encoder):
    """Remembers where its weights were sent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sent_to: list[torch.device] = []

    def _move(self, device: torch.device) -> torch.nn.Module:
        self.sent_to.append(device)
        return super()._move(device)


@pytest.mark.parametrize("offload", [True, False])
async def test_offloaded_weights_are_on_the_device_only_while_they_compute(
    vjepa2_folder: str, lane: DeviceLane, offload: bool
) -> None:
    device = torch.device("cpu", 0)
    encoder = Travelling(
        config_of(vjepa2_folder, offload=offload, videos_per_batch=2), "image", lane, device
    )
    for _ in range(2):
        await encoder.embed([with_frames(3, seed=seed) for seed in range(3)])
    # two batches a call, then back
    assert encoder.sent_to == ([device, device, CPU] if offload else [device, device]) * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_offloading_leaves_nothing_on_the_gpu(vjepa2_folder: str, lane: DeviceLane) -> None:
    def encoder() -> VJepa2Encoder:
        config = config_of(vjepa2_folder, offload=True)
        return VJepa2Encoder(config, "image", lane, torch.device("cuda"))

    await encoder().embed([with_frames(3)])  # allocates cuBLAS' workspaces, which stay
    before = torch.cuda.memory_allocated()
    # patches are embedded by a convolution, which would be rounded to TF32
    with torch.backends.cudnn.flags(allow_tf32=False):
        on_gpu = await encoder().embed([with_frames(3)])
    assert torch.cuda.memory_allocated() == before
    np.testing.assert_allclose(
        on_gpu, await encoder_of(vjepa2_folder, lane).embed([with_frames(3)]), atol=1e-3
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_weights_have_the_stated_precision(vjepa2_folder: str, precision: str) -> None:
    encoder = load_encoder(config_of(vjepa2_folder, precision=precision))
    assert {parameter.dtype for parameter in encoder.parameters()} == {getattr(torch, precision)}
    assert not any(parameter.requires_grad for parameter in encoder.parameters())


async def test_half_precision_gives_nearly_the_same_embedding(
    vjepa2_folder: str, lane: DeviceLane
) -> None:
    exact = await encoder_of(vjepa2_folder, lane).embed([with_frames(9)])
    half = await encoder_of(vjepa2_folder, lane, precision="bfloat16").embed([with_frames(9)])
    assert half.dtype == np.float32
    assert 0.0 < np.abs(half - exact).max() < 0.05 * np.abs(exact).max()


def test_a_folder_that_is_not_vjepa2_is_refused_before_anything_starts(
    tmp_path: Path, lane: DeviceLane
) -> None:
    with pytest.raises(ConfigError, match="there is no such folder; expected one"):
        encoder_of(str(tmp_path / "nowhere"), lane)
    with pytest.raises(ConfigError, match=r"holds no config\.json; expected a V-JEPA 2 checkpoint"):
        encoder_of(str(tmp_path), lane)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"whose config\.json cannot be read"):
        encoder_of(str(tmp_path), lane)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="holds a model of type 'llama', expected 'vjepa2'"):
        encoder_of(str(tmp_path), lane)


def test_a_checkpoint_without_some_of_its_weights_is_refused(
    vjepa2_folder: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(Path(vjepa2_folder) / "model.safetensors")
    del tensors["encoder.layer.1.mlp.fc1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((Path(vjepa2_folder) / "config.json").read_bytes())
    with pytest.raises(
        ConfigError, match=r"lacks 1 tensors of its encoder, the first is 'encoder.layer.1.mlp.fc1"
    ):
        load_encoder(config_of(str(tmp_path)))


def test_an_image_size_that_patches_do_not_fill_is_refused(vjepa2_folder: str) -> None:
    with pytest.raises(ConfigError, match="image_size is 40, expected a multiple of the patches"):
        load_encoder(VJepa2Config(folder=vjepa2_folder, num_frames=8, image_size=40))


async def test_a_trajectory_without_usable_images_is_refused_by_its_episode(
    vjepa2_folder: str, lane: DeviceLane
) -> None:
    encoder = encoder_of(vjepa2_folder, lane)
    with pytest.raises(
        ValueError, match="episode 7 cannot be embedded: its observation has no 'image'"
    ):
        await encoder.embed([with_frames(3), with_states(1, 2, episode_id=7)])
    empty = trajectory_of([{"image": np.zeros((0, 8, 3), np.uint8)}], 8)
    with pytest.raises(
        ValueError, match=r"episode 8 cannot be embedded: 'image' is uint8 \[0, 8, 3\]"
    ):
        await encoder.embed([empty])


async def test_embeddings_that_are_not_finite_are_refused_by_their_episode(
    vjepa2_folder: str, lane: DeviceLane, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(Path(vjepa2_folder) / "model.safetensors")
    # finite weights; their sum over tokens is not
    tensors["encoder.layernorm.bias"][0] = torch.finfo(torch.float32).max
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((Path(vjepa2_folder) / "config.json").read_bytes())
    with pytest.raises(
        ValueError, match="episode 4 cannot be embedded: its embedding is not finite"
    ):
        await encoder_of(str(tmp_path), lane).embed([with_frames(3, episode_id=4)])


def test_the_configuration_chooses_the_encoder(vjepa2_folder: str, lane: DeviceLane) -> None:
    from vla_rl.models.openvla_oft import OpenVlaOft, tiny
    from vla_rl.models.trajectory_encoders import trajectory_encoder

    policy = OpenVlaOft.create(tiny(image_size=28, cameras=("image",), proprio=None), seed=0)
    config = EmbeddingConfig(encoder="vjepa2", vjepa2=config_of(vjepa2_folder))
    encoder: TrajectoryEncoder = trajectory_encoder(config, policy, lane)
    assert isinstance(encoder, VJepa2Encoder)


THREE = EmbeddingConfig(encoder="policy", num_frames=3)


@pytest.fixture
def policy() -> OpenVlaOft:
    return OpenVlaOft.create(tiny(image_size=28, cameras=("image",), proprio=None), seed=0)


def make_trajectory(seed: int, num: int = 5, size: int = 28) -> Trajectory:
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
    trajectory = make_trajectory(1)
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
    before = await encoder.embed([make_trajectory(1)])
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(1.0)
    assert (await encoder.embed([make_trajectory(1)])).tolist() == before.tolist()


async def test_each_trajectory_is_embedded_by_its_own_observations(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    together = await PolicyTowerEncoder(THREE, policy, lane).embed(
        [make_trajectory(1), make_trajectory(2, num=9)]
    )
    alone = await PolicyTowerEncoder(THREE, policy, lane).embed([make_trajectory(2, num=9)])
    np.testing.assert_allclose(together[1], alone[0], atol=1e-6)
    assert np.abs(together[0] - together[1]).max() > 1e-3


async def test_an_observation_that_the_policy_cannot_see_is_refused_by_its_episode(
    policy: OpenVlaOft, lane: DeviceLane
) -> None:
    blind = make_trajectory(6)
    for step in blind.steps:
        del step.observation["image"]
    with pytest.raises(ValueError, match="episode 6 cannot be embedded"):
        await PolicyTowerEncoder(THREE, policy, lane).embed([blind])


def test_a_tower_that_is_damaged_or_not_finite_is_refused(
    policy: OpenVlaOft, lane: DeviceLane, tmp_path: Path
) -> None:
    encoder = PolicyTowerEncoder(THREE, policy, lane)
    encoder.save_tower(tmp_path / "tower")
    encoder.load_tower(tmp_path / "tower")
    tensors = load_file(tmp_path / "tower")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "nan")
    with pytest.raises(CheckpointError, match="not finite"):
        encoder.load_tower(tmp_path / "nan")
    (tmp_path / "cut").write_bytes((tmp_path / "tower").read_bytes()[:100])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        encoder.load_tower(tmp_path / "cut")


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
