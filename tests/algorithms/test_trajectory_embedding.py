"""Embeddings of trajectories: each by its own frames, and refused by episode where they make no sense."""

from typing import Any

import numpy as np
import pytest

from vla_rl.algorithms import EmbeddingConfig, trajectory_embedding, trajectory_embeddings
from vla_rl.algorithms.trajectory_embedding import area_resize
from vla_rl.errors import ConfigError
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory

STATES = EmbeddingConfig(encoder="state", num_frames=3)


def trajectory_of(observations: list[dict[str, Any]], episode_id: int = 0) -> Trajectory:
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    steps = tuple(Step(observation=o, chunk=chunk, rewards=np.zeros(1, np.float32)) for o in observations[:-1])
    spec = EpisodeSpec(
        episode_id=episode_id, group_id=0, member=0, env=EnvSpec(id="toy"), task="t", seed=0, policy_seed=0
    )
    return Trajectory(episode=spec, steps=steps, final_observation=observations[-1], stop_reason=StopReason.TIME_LIMIT)


def with_states(*states: float, episode_id: int = 0) -> Trajectory:
    return trajectory_of([{"state": np.array([s], np.float32)} for s in states], episode_id)


def test_frames_are_evenly_spaced_from_the_first_to_the_final_observation() -> None:
    assert trajectory_embedding(with_states(0, 1, 2, 3, 4, 5, 6), STATES).tolist() == [0.0, 3.0, 6.0]
    assert trajectory_embedding(with_states(0, 1, 2), STATES).tolist() == [0.0, 1.0, 2.0]


def test_a_short_trajectory_repeats_frames_in_place() -> None:
    config = EmbeddingConfig(encoder="state", num_frames=5)
    assert trajectory_embedding(with_states(7), config).tolist() == [7.0] * 5
    assert trajectory_embedding(with_states(7, 9), config).tolist() == [7.0, 7.0, 7.0, 9.0, 9.0]


def test_a_single_frame_is_the_final_one() -> None:
    assert trajectory_embedding(with_states(1, 2, 3), EmbeddingConfig(encoder="state", num_frames=1)).tolist() == [3.0]


def test_area_resize_averages_exactly_the_pixels_it_covers() -> None:
    image = np.zeros((3, 4, 1), np.uint8)
    image[:, :, 0] = [[0, 255, 0, 0], [255, 0, 0, 0], [0, 0, 0, 255]]
    # 2 x 2 cells of 1.5 x 2 pixels: (0 + 1 + 0.5 * 1 + 0) / 3, 0, (0.5 * 1) / 3, 1 / 3
    np.testing.assert_allclose(area_resize(image, 2)[:, :, 0], [[0.5, 0.0], [1 / 6, 1 / 3]], atol=1e-6)


def test_area_resize_keeps_the_mean_of_the_image() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 37, 3), dtype=np.uint8)
    np.testing.assert_allclose(area_resize(image, 16).mean(axis=(0, 1)), image.mean(axis=(0, 1)) / 255.0, atol=1e-5)


def test_pixels_have_one_size_for_any_length_of_trajectory() -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (20, 32, 48, 3), dtype=np.uint8)
    trajectories = [trajectory_of([{"image": frame} for frame in frames[:num]], num) for num in (1, 4, 20)]
    embeddings = trajectory_embeddings(trajectories, EmbeddingConfig(num_frames=4, image_size=16))
    assert embeddings.shape == (3, 4 * 16 * 16 * 3)
    assert embeddings.dtype == np.float32


def test_members_of_one_group_have_embeddings_of_their_own() -> None:
    embeddings = trajectory_embeddings([with_states(0, 1, 2), with_states(0, 5, 9)], STATES)
    assert embeddings.tolist() == [[0.0, 1.0, 2.0], [0.0, 5.0, 9.0]]


def test_no_trajectory_gives_no_row() -> None:
    assert trajectory_embeddings([], STATES).shape == (0, 0)


def test_every_refusal_names_the_episode() -> None:
    def wide(episode_id: int) -> Trajectory:
        return trajectory_of([{"state": np.zeros(2, np.float32)}], episode_id)

    with pytest.raises(ValueError, match="episode 9 has 6 numbers, but that of episode 8 has 3"):
        trajectory_embeddings([with_states(0, episode_id=8), wide(9)], STATES)
    with pytest.raises(ValueError, match="episode 5 cannot be embedded: its state are not finite"):
        trajectory_embedding(with_states(0, float("nan"), episode_id=5), STATES)
    with pytest.raises(
        ValueError, match=r"episode 6 cannot be embedded: its observation has no 'image', only \['state'\]"
    ):
        trajectory_embedding(with_states(0, episode_id=6), EmbeddingConfig())
    with pytest.raises(ValueError, match=r"episode 7 .*'image' is float64 \[4, 4, 3\], expected uint8"):
        trajectory_embedding(trajectory_of([{"image": np.zeros((4, 4, 3))}], 7), EmbeddingConfig())
    growing = [{"state": np.zeros(1)}, {"state": np.zeros(2)}]
    with pytest.raises(ValueError, match="episode 3 cannot be embedded: its state change size"):
        trajectory_embedding(trajectory_of(growing, 3), STATES)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder": "pixel"}, "did you mean 'pixels'"),
        ({"num_frames": 0}, "EmbeddingConfig.num_frames is 0"),
        ({"image_size": 0}, "EmbeddingConfig.image_size is 0"),
    ],
)
def test_a_config_out_of_range_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingConfig(**fields)
