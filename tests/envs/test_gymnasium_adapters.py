"""Gymnasium's own environments, vector environments and wrappers, with observations and actions of ours."""

import copy
import string
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector.utils import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from vla_rl.envs.gymnasium_adapters import ActionChunks, ControlEnv, Words, run_chunk
from vla_rl.rollout import stop_reason
from vla_rl.types import StopReason


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


@pytest.mark.filterwarnings("ignore:.*WARN.*:UserWarning")  # advice on how wide spaces should be
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "FrozenLake-v1"])
def test_it_keeps_gymnasiums_contract(env_id: str) -> None:
    check_env(ControlEnv(env_id, step_limit=20), skip_render_check=True)


def test_a_discrete_action_is_a_number_rounded_to_the_nearest_choice() -> None:
    ours, inner = ControlEnv("CartPole-v1"), gymnasium.make("CartPole-v1")
    ours.reset(seed=3)
    inner.reset(seed=3)
    for number, choice in ((0.0, 0), (1.0, 1), (0.7, 1), (0.2, 0)):
        seen = ours.step(np.array([number], np.float32))[0]["state"]
        np.testing.assert_array_equal(seen, inner.step(choice)[0])
    assert ours.action_space == gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)


def test_a_time_limit_truncates_and_a_fall_terminates() -> None:
    env = ControlEnv("CartPole-v1", step_limit=5, reward_scale=0.1, success_return=5.0)
    env.reset(seed=0)
    outcomes = [env.step(np.array([number % 2], np.float32)) for number in range(5)]
    assert [outcome[3] for outcome in outcomes] == [False] * 4 + [True]
    assert not any(outcome[2] for outcome in outcomes)
    assert [outcome[1] for outcome in outcomes] == pytest.approx([0.1] * 5)
    assert [outcome[4]["is_success"] for outcome in outcomes] == [False] * 4 + [True]
    assert outcomes[-1][4]["return"] == 5.0
    env = ControlEnv("CartPole-v1", step_limit=100)
    env.reset(seed=0)
    while True:
        # always to the right: it falls
        _, _, terminated, truncated, info = env.step(np.array([1.0], np.float32))
        if terminated or truncated:
            break
    assert (terminated, truncated) == (True, False)
    assert "is_success" not in info  # no return was said to be a success, so none is known


def end_of(env: ControlEnv, push: float | None = None) -> tuple[bool, bool, StopReason, int]:
    """How an episode from seed 0 ends: terminated, truncated, the reason, and its length.

    Balanced, or always pushed.
    """
    env.reset(seed=0)
    num_steps = 0
    while True:
        action = float(num_steps % 2) if push is None else push
        _, _, terminated, truncated, info = env.step(np.array([action], np.float32))
        num_steps += 1
        if terminated or truncated:
            return terminated, truncated, stop_reason(terminated, info), num_steps


@pytest.mark.parametrize("success_return", [5.0, 3.0])
def test_a_return_that_succeeds_at_the_time_limit_is_a_success_and_still_cut_off(
    success_return: float,
) -> None:
    end = end_of(ControlEnv("CartPole-v1", step_limit=5, success_return=success_return))
    # the pole stands: its value goes on
    assert end == (False, True, StopReason.SUCCESS_AT_LIMIT, 5)
    assert end[2].is_success
    assert end[2].is_cut_off


def test_a_return_that_fails_at_the_time_limit_is_cut_off() -> None:
    end = end_of(ControlEnv("CartPole-v1", step_limit=5, success_return=5.5))
    assert end == (False, True, StopReason.TIME_LIMIT, 5)


@pytest.mark.parametrize(
    ("success_return", "reason"),
    [(8.0, StopReason.SUCCESS), (8.5, StopReason.TERMINATED), (None, StopReason.TERMINATED)],
)
def test_an_end_of_the_task_at_the_very_step_of_the_limit_is_an_end(
    success_return: float | None, reason: StopReason
) -> None:
    free = end_of(
        ControlEnv("CartPole-v1", step_limit=100, success_return=success_return), push=1.0
    )
    assert free == (True, False, reason, 8)  # it falls at the eighth step
    limited = end_of(
        ControlEnv("CartPole-v1", step_limit=8, success_return=success_return), push=1.0
    )
    assert (limited[0], limited[2], limited[3]) == (True, reason, 8)
    assert not limited[2].is_cut_off


def test_actions_that_are_neither_a_choice_nor_bounded_are_refused() -> None:
    with pytest.raises(ValueError, match="step_limit is 0"):
        ControlEnv("CartPole-v1", step_limit=0)
