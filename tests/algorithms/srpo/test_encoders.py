"""Embeddings of trajectories: each by its own frames, and refused by episode where they make no
sense.
"""

import numpy as np
import pytest
from small_batches import trajectory_of, with_states

from vla_rl.algorithms import (
    EmbeddingConfig,
    ObservationEncoder,
    VJepa2Config,
    trajectory_embedding,
    trajectory_embeddings,
)
from vla_rl.algorithms.srpo.encoders import area_resize, video_frames
from vla_rl.errors import ConfigError
from vla_rl.types import Trajectory

STATES = EmbeddingConfig(encoder="state", num_frames=3)


def test_moments_are_evenly_spaced_from_the_first_to_the_final_observation() -> None:
    assert trajectory_embedding(with_states(0, 1, 2, 3, 4, 5, 6), STATES).tolist() == [
        [0.0],
        [3.0],
        [6.0],
    ]
    assert trajectory_embedding(with_states(0, 1, 2), STATES).tolist() == [[0.0], [1.0], [2.0]]


def test_a_short_trajectory_repeats_moments_in_place() -> None:
    config = EmbeddingConfig(encoder="state", num_frames=5)
    assert trajectory_embedding(with_states(7), config).ravel().tolist() == [7.0] * 5
    assert trajectory_embedding(with_states(7, 9), config).ravel().tolist() == [
        7.0,
        7.0,
        7.0,
        9.0,
        9.0,
    ]


def test_a_single_moment_is_the_final_one() -> None:
    assert trajectory_embedding(
        with_states(1, 2, 3), EmbeddingConfig(encoder="state", num_frames=1)
    ).tolist() == [[3]]


def test_area_resize_averages_exactly_the_pixels_it_covers() -> None:
    image = np.zeros((3, 4, 1), np.uint8)
    image[:, :, 0] = [[0, 255, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]
    # 2 x 2 cells of 1.5 x 2 pixels: (0 + 1 + 0.5 * 1 + 0) / 3, 0, (0.5 * 1) / 3, 1 / 3
    np.testing.assert_allclose(
        area_resize(image, 2)[:, :, 0], [[0.5, 0.0], [1 / 6, 1 / 3]], atol=1e-6
    )


def test_area_resize_keeps_the_mean_of_the_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 37, 3), dtype=np.uint8)
    np.testing.assert_allclose(
        area_resize(image, 16).mean(axis=(0, 1)), image.mean(axis=(0, 1)) / 255.0, atol=1e-5
    )


def test_pixels_have_one_size_for_any_length_of_trajectory() -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (20, 32, 48, 3), dtype=np.uint8)
    trajectories = [
        trajectory_of([{"image": frame} for frame in frames[:num]], num) for num in (1, 4, 20)
    ]
    embeddings = trajectory_embeddings(trajectories, EmbeddingConfig(num_frames=4, image_size=16))
    assert embeddings.shape == (3, 4, 16 * 16 * 3)
    assert embeddings.dtype == np.float32


def test_members_of_one_group_have_embeddings_of_their_own() -> None:
    embeddings = trajectory_embeddings([with_states(0, 1, 2), with_states(0, 5, 9)], STATES)
    assert embeddings[..., 0].tolist() == [[0.0, 1.0, 2.0], [0.0, 5.0, 9.0]]


async def test_the_encoder_gives_what_the_function_does() -> None:
    trajectories = [with_states(0, 1, 2), with_states(0, 5, 9)]
    embeddings = await ObservationEncoder(STATES).embed(trajectories)
    assert embeddings.tolist() == trajectory_embeddings(trajectories, STATES).tolist()


def test_no_trajectory_gives_no_row() -> None:
    assert trajectory_embeddings([], STATES).shape == (0, 0, 0)


def test_the_video_is_what_the_steps_kept_between_the_first_and_the_final_image() -> None:
    images = [np.full((2, 2, 3), shade, np.uint8) for shade in (0, 40, 50)]
    kept = [
        np.stack([np.full((2, 2, 3), shade, np.uint8) for shade in shades])
        for shades in ((10, 20), (45,))
    ]
    observations = [{"image": image} for image in images]
    assert [frame[0, 0, 0] for frame in video_frames(trajectory_of(observations), "image")] == [
        0,
        40,
        50,
    ]
    assert [
        frame[0, 0, 0] for frame in video_frames(trajectory_of(observations, 0, kept), "image")
    ] == [0, 10, 20, 45, 50]
    partly = trajectory_of(observations, 0, [kept[0], None])
    assert [frame[0, 0, 0] for frame in video_frames(partly, "image")] == [0, 10, 20, 50]


@pytest.mark.parametrize(
    ("frames_key", "shown"),
    [("image", "show 'image'"), (None, "show what its environment renders, which may be anything")],
)
def test_frames_of_another_camera_are_refused(frames_key: str | None, shown: str) -> None:
    seen = [
        {"image": np.zeros((2, 2, 3), np.uint8), "wrist_image": np.full((2, 2, 3), 9, np.uint8)}
    ] * 2
    kept = np.full((1, 2, 2, 3), 5, np.uint8)
    wrist = EmbeddingConfig(num_frames=3, image_size=1, image_key="wrist_image")
    message = (
        f"image_key is 'wrist_image', but .* episode 4 kept .* {shown}; .* render_key='wrist_image'"
    )
    with pytest.raises(ConfigError, match=message):
        trajectory_embedding(trajectory_of(seen, 4, [kept], frames_key), wrist)
    ours = trajectory_embedding(trajectory_of(seen, 4, [kept], "wrist_image"), wrist)
    assert (ours[:, 0] * 255).round().tolist() == [9.0, 5.0, 9.0]
    without = trajectory_of(seen, 4, [None], frames_key)
    assert len(video_frames(without, "wrist_image")) == 2


def test_every_refusal_names_the_episode() -> None:
    def wide(episode_id: int) -> Trajectory:
        return trajectory_of([{"state": np.zeros(2, np.float32)}], episode_id)

    with pytest.raises(
        ValueError, match=r"episode 9 is \[3, 2\], but that of episode 8 is \[3, 1\]"
    ):
        trajectory_embeddings([with_states(0, episode_id=8), wide(9)], STATES)
    with pytest.raises(
        ValueError, match="episode 5 cannot be embedded: its embedding is not finite"
    ):
        trajectory_embeddings([with_states(0, float("nan"), episode_id=5)], STATES)
    with pytest.raises(
        ValueError,
        match=r"episode 6 cannot be embedded: its observation has no 'image', only \['state'\]",
    ):
        trajectory_embedding(with_states(0, episode_id=6), EmbeddingConfig())
    with pytest.raises(
        ValueError, match=r"episode 7 .*'image' is float64 \[4, 4, 3\], expected uint8"
    ):
        trajectory_embedding(trajectory_of([{"image": np.zeros((4, 4, 3))}], 7), EmbeddingConfig())
    with pytest.raises(
        ValueError, match=r"episode 2 .*'image' is uint8 \[0, 4, 3\], expected uint8"
    ):
        trajectory_embedding(
            trajectory_of([{"image": np.zeros((0, 4, 3), np.uint8)}], 2), EmbeddingConfig()
        )
    growing = [{"state": np.zeros(1)}, {"state": np.zeros(2)}]
    with pytest.raises(ValueError, match="episode 3 cannot be embedded: its state changes size"):
        trajectory_embedding(trajectory_of(growing, 3), STATES)
    zooming = [{"image": np.zeros((size, size, 3), np.uint8)} for size in (4, 5)]
    with pytest.raises(
        ValueError, match=r"episode 4 .*frames are \[4, 4, 3\] and \[5, 5, 3\], expected one size"
    ):
        trajectory_embedding(trajectory_of(zooming, 4), EmbeddingConfig())


def test_an_encoder_with_a_network_is_not_made_here() -> None:
    with pytest.raises(
        ConfigError, match=r"'policy', expected 'pixels' or 'state' here; vla_rl.models"
    ):
        ObservationEncoder(EmbeddingConfig(encoder="policy"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder": "pixel"}, "did you mean 'pixels'"),
        ({"encoder": "vjepa"}, "did you mean 'vjepa2'"),
        ({"encoder": "vjepa2"}, "embedding.vjepa2.folder to name a V-JEPA 2 checkpoint"),
        ({"num_frames": 0}, "EmbeddingConfig.num_frames is 0"),
        ({"image_size": 0}, "EmbeddingConfig.image_size is 0"),
    ],
)
def test_a_config_out_of_range_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "fp16"}, "expected one of 'bfloat16', 'float16', 'float32'"),
        ({"short_videos": "stretch"}, "did you mean 'stretched'"),
        (
            {"num_moments": 5, "short_videos": "stretched"},
            "VJepa2Config.num_moments is 5, expected a divisor of 32",
        ),
        (
            {"num_moments": 8},
            "VJepa2Config.short_videos is 'cyclic', expected 'stretched' with several moments",
        ),
    ],
)
def test_a_vjepa2_config_out_of_range_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        VJepa2Config(**fields)
