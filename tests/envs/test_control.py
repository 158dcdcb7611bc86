"""Gymnasium's small environments behind a dict observation and a Box action."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_rl.envs.control import ControlEnv
from vla_rl.rollout import stop_reason
from vla_rl.types import StopReason


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
