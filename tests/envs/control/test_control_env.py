"""Gymnasium's small environments behind a dict observation and a Box action."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_rl.envs.control import ControlEnv


@pytest.mark.filterwarnings("ignore:.*WARN.*:UserWarning")  # advice on how wide spaces should be
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
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
        _, _, terminated, truncated, info = env.step(np.array([1.0], np.float32))  # always to the right: it falls
        if terminated or truncated:
            break
    assert (terminated, truncated, info["is_success"]) == (True, False, False)


def test_actions_that_are_neither_a_choice_nor_bounded_are_refused() -> None:
    with pytest.raises(ValueError, match="step_limit is 0"):
        ControlEnv("CartPole-v1", step_limit=0)
