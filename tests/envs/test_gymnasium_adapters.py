"""Action chunks as a wrapper, instructions in gymnasium's own vector environments."""

import copy
import string
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from vla_rl.envs.gymnasium_adapters import ActionChunks, Words, run_chunk


class Countdown(gymnasium.Env[np.ndarray, np.ndarray]):
    """Rewards the k-th step with k and terminates at `length`; counts how often it drew."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, length: int) -> None:
        self.render_every_step = True
        self.drawn_at: list[int] = []
        self._length = length
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._count += 1
        is_over = self._count >= self._length
        if self.render_every_step or is_over:
            self.drawn_at.append(self._count)
        return (
            np.array([self._count], np.float32),
            float(self._count),
            is_over,
            False,
            {"count": self._count},
        )

    def render(self) -> np.ndarray:  # type: ignore[override]
        return np.array([self._count])


def test_every_row_runs_and_is_rewarded() -> None:
    env = ActionChunks(Countdown(length=10), chunk_size=3)
    env.reset()
    observation, reward, terminated, truncated, info = env.step(np.zeros((3, 2), np.float32))
    assert observation.tolist() == [3.0]
    assert reward == 6.0
    assert (terminated, truncated) == (False, False)
    assert info["rewards"].tolist() == [1.0, 2.0, 3.0]
    assert info["num_executed"] == info["count"] == 3


def test_a_chunk_stops_at_the_exact_end_of_the_episode() -> None:
    env = ActionChunks(Countdown(length=2), chunk_size=8)
    env.reset()
    _, reward, terminated, _, info = env.step(np.zeros((8, 2), np.float32))
    assert terminated
    assert reward == 3.0
    assert info["rewards"].tolist() == [1.0, 2.0]
    assert info["num_executed"] == 2


def test_only_the_last_row_is_rendered() -> None:
    env = Countdown(length=100)
    env.reset()
    run_chunk(env, np.zeros((4, 2), np.float32))
    run_chunk(env, np.zeros((4, 2), np.float32))
    assert env.drawn_at == [4, 8]
    assert env.render_every_step is True


def test_the_end_of_an_episode_is_rendered_in_the_middle_of_a_chunk() -> None:
    env = Countdown(length=6)
    env.reset()
    run_chunk(env, np.zeros((4, 2), np.float32))
    run_chunk(env, np.zeros((4, 2), np.float32))
    assert env.drawn_at == [4, 6]


def test_frames_are_those_of_every_kth_control_step_of_the_episode_whatever_the_chunks() -> None:
    env = Countdown(length=8)
    chunks = ActionChunks(env, chunk_size=3, frames_every=2)
    for _ in range(2):
        chunks.reset()
        infos = [chunks.step(np.zeros((3, 2), np.float32))[4] for _ in range(3)]
        assert [info["frames"][:, 0].tolist() for info in infos] == [[2], [4, 6], [8]]
    assert env.drawn_at == [3, 6, 8] * 2  # observations are drawn no more often for it


def test_a_video_gets_every_row() -> None:
    chunks = ActionChunks(Countdown(length=100), chunk_size=3, frames_every=1)
    chunks.reset()
    assert chunks.step(np.zeros((3, 2), np.float32))[4]["frames"][:, 0].tolist() == [1, 2, 3]


def test_a_chunk_in_which_no_frame_is_due_has_none() -> None:
    chunks = ActionChunks(Countdown(length=100), chunk_size=3, frames_every=4)
    chunks.reset()
    assert "frames" not in chunks.step(np.zeros((3, 2), np.float32))[4]


def test_frames_of_an_environment_that_renders_nothing_are_refused() -> None:
    env = gymnasium.make("vla_rl.envs:vla_rl/toy_reach-v0", task_id=0)
    env.reset(seed=0)
    with pytest.raises(
        ValueError,
        match='render returned NoneType; make the environment with render_mode="rgb_array"',
    ):
        run_chunk(env, np.zeros((2, 7), np.float32), frames_every=1)
    with pytest.raises(ValueError, match="frames_every is 0, expected >= 1"):
        run_chunk(env, np.zeros((2, 7), np.float32), frames_every=0)


def test_the_action_space_is_a_stack_of_rows() -> None:
    env = ActionChunks(Countdown(length=1), chunk_size=5)
    assert env.action_space == spaces.Box(-1.0, 1.0, (5, 2), np.float32)


def test_an_empty_chunk_is_refused() -> None:
    env = Countdown(length=1)
    env.reset()
    with pytest.raises(ValueError, match="at least one row"):
        run_chunk(env, np.zeros((0, 2), np.float32))


def test_only_boxes_are_chunked() -> None:
    with pytest.raises(TypeError, match="expected a Box"):
        ActionChunks(gymnasium.make("CartPole-v1"), chunk_size=2)


def test_a_chunk_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="expected >= 1"):
        ActionChunks(Countdown(length=1), chunk_size=0)


def test_an_episode_cut_by_gymnasiums_time_limit_still_shows_its_last_image() -> None:
    env = gymnasium.make("vla_rl.envs:vla_rl/toy_reach-v0", task_id=0, max_episode_steps=3)
    env.reset(seed=0)
    right = np.tile(np.array([0.2, 0, 0, 0, 0, 0, 0], np.float32), (8, 1))
    observation, rewards, _, truncated, _ = run_chunk(env, right)
    assert truncated
    assert len(rewards) == 3
    assert np.array_equal(observation["image"], env.unwrapped._draw())


SPACE = Words(32, charset=string.ascii_lowercase + " ")


def test_instructions_are_read_whenever_they_are_asked_for() -> None:
    memory = create_shared_memory(SPACE, n=2)
    seen = read_from_shared_memory(SPACE, memory, n=2)
    write_to_shared_memory(SPACE, 0, "open the drawer", memory)
    write_to_shared_memory(SPACE, 1, "close it", memory)
    assert (seen[0], seen[1], seen[:], len(seen)) == (
        "open the drawer", "close it", ("open the drawer", "close it"), 2,
    )  # fmt: skip
    write_to_shared_memory(SPACE, 1, "close the box", memory)
    assert seen[1] == "close the box"


def test_a_copy_keeps_the_instructions_of_its_moment() -> None:
    memory = create_shared_memory(SPACE, n=1)
    write_to_shared_memory(SPACE, 0, "open the drawer", memory)
    kept = copy.deepcopy(read_from_shared_memory(SPACE, memory, n=1))
    write_to_shared_memory(SPACE, 0, "close it", memory)
    assert kept == ("open the drawer",)
