"""A chunk is executed row by row, until it is done or the episode ends."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.env_workers.checked_env import run_chunk
from vla_rl.errors import EnvError


class Counter(gymnasium.Env[int, np.ndarray]):
    """Counts its steps, notes which of them it rendered, and ends after `length` steps."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, length: int = 100, answer: Any = None) -> None:
        self.num_steps, self._length, self._answer = 0, length, answer
        self.render_every_step = True
        self.rendered: list[int] = []

    def step(self, action: np.ndarray) -> Any:
        self.num_steps += 1
        if self.render_every_step:
            self.rendered.append(self.num_steps)
        if self._answer is not None:
            return self._answer
        is_over = self.num_steps >= self._length
        return self.num_steps, float(action[0]), is_over, False, {"at": self.num_steps}

    def render(self) -> Any:
        return np.full((2, 2, 3), self.num_steps, np.uint8)


CHUNK = np.array([[0.5], [-0.5], [1.0]], np.float32)


def test_every_row_is_executed_and_its_reward_kept() -> None:
    observation, rewards, terminated, truncated, info = run_chunk(Counter(), CHUNK)
    assert (observation, terminated, truncated) == (3, False, False)
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [0.5, -0.5, 1.0]
    assert info == {"at": 3, "num_executed": 3}


def test_no_row_is_executed_after_the_end_of_the_episode() -> None:
    env = Counter(length=2)
    _, rewards, terminated, _, info = run_chunk(env, CHUNK)
    assert (env.num_steps, terminated, info["num_executed"]) == (2, True, 2)
    assert rewards.tolist() == [0.5, -0.5]


def test_only_the_last_row_is_rendered_and_the_environment_is_left_as_it_was() -> None:
    env = Counter()
    run_chunk(env, CHUNK)
    assert env.rendered == [3]
    assert env.render_every_step


def test_frames_are_kept_from_each_kth_step_of_the_episode() -> None:
    env = Counter()
    env.num_steps = 3
    *_, info = run_chunk(env, CHUNK, frames_every=2, num_steps_before=3)
    assert info["frames"][:, 0, 0, 0].tolist() == [4, 6]


def test_what_no_chunk_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"action chunk is \(0, 1\), expected at least one row"):
        run_chunk(Counter(), CHUNK[:0])
    with pytest.raises(ValueError, match="frames_every is 0, expected >= 1"):
        run_chunk(Counter(), CHUNK, frames_every=0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((1, 0.0, False, False), "Counter: step returned a tuple of 4, expected a tuple"),
        ((1, "much", False, False, {}), "Counter: step returned the reward str 'much', expected a"),
    ],
)
def test_an_answer_that_is_not_gymnasiums_is_named_with_its_environment(
    answer: Any, said: str
) -> None:
    env = Counter(answer=answer)
    with pytest.raises(EnvError, match=said):
        run_chunk(env, CHUNK)
    assert env.render_every_step
