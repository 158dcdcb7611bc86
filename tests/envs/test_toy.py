"""The reaching task: its rules, its optimum, its faults on request."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import vla_rl.envs  # noqa: F401  # registers the ids
from vla_rl.envs.toy import COLOURS, FaultyEnv, ToyReachEnv


def make(**kwargs: Any) -> ToyReachEnv:
    env = gymnasium.make("vla_rl/toy_reach-v0", **kwargs).unwrapped
    assert isinstance(env, ToyReachEnv)
    return env


@pytest.mark.parametrize("seed", range(20))
def test_the_optimal_action_needs_exactly_the_optimal_number_of_steps(seed: int) -> None:
    env = make()
    env.reset(seed=seed)
    promised = env.optimal_num_steps()
    for number in range(1, promised + 1):
        _, reward, terminated, _, info = env.step(env.optimal_action())
        assert terminated == (number == promised)
    assert reward == 1.0
    assert info["is_success"] is True


def test_no_action_is_faster_than_the_optimum() -> None:
    """From (0, 0) the right square begins at 0.7 - 0.2 = 0.5 on both axes: three steps of 0.2 at
    full speed, never two.
    """
    env = make(task_id=0)
    env.reset(seed=0)
    state = env.get_state()
    env.set_state({**state, "hand": np.zeros(2)})
    assert env.optimal_num_steps() == 3
    direction = np.sign(env.optimal_action())
    for expected in (False, False, True):
        assert env.step(direction)[2] is expected


def test_the_image_shows_the_hand_where_the_state_says() -> None:
    """x = 0.5 is column 24 of 32, y = -0.5 (below the middle) is row 24."""
    env = make(task_id=0)
    env.reset(seed=0)
    observation = env.set_state({**env.get_state(), "hand": np.array([0.5, -0.25])})
    assert observation["image"][20, 24].tolist() == [250, 250, 250]
    assert observation["state"].tolist() == [0.5, -0.25]


def test_only_image_and_instruction_together_tell_where_to_go() -> None:
    env = make()
    observation, _ = env.reset(options={"init_state_id": 3})
    colour = observation["instruction"].split()[2]
    goal = env.goal_position()
    column, row = (int((goal[0] + 1) * 16), int((1 - goal[1]) * 16))
    assert tuple(observation["image"][row, column]) == COLOURS[colour]


def test_the_wrong_square_ends_the_episode_without_success() -> None:
    env = make(task_id=0)
    env.reset(seed=1)
    wrong = -np.sign(env.goal_position())
    env.set_state({**env.get_state(), "hand": wrong * 0.45})
    action = np.zeros(7, np.float32)
    action[:2] = wrong
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, True, False, False)


def test_the_time_limit_truncates() -> None:
    env = make(step_limit=3)
    env.reset(seed=0)
    still = np.zeros(7, np.float32)
    assert [env.step(still)[2:4] for _ in range(3)] == [
        (False, False),
        (False, False),
        (False, True),
    ]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(still)


def test_an_init_state_is_the_same_whatever_the_seed_and_differs_from_the_next() -> None:
    env = make()
    first, _ = env.reset(seed=1, options={"init_state_id": 7})
    again, _ = env.reset(seed=2, options={"init_state_id": 7})
    other, _ = env.reset(seed=2, options={"init_state_id": 8})
    assert np.array_equal(first["image"], again["image"])
    assert np.array_equal(first["state"], again["state"])
    assert not np.array_equal(first["state"], other["state"])


@pytest.mark.parametrize(
    "options",
    [
        {"init_state_id": 50},
        {"init_state_id": -1},
        {"init_state_id": "1"},
        {"init_state_id": True},
        {"initial_state": 1},
    ],
)
def test_an_unknown_start_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        make().reset(options=options)


def test_an_action_of_nan_is_refused_and_moves_nothing() -> None:
    env = make()
    before, _ = env.reset(seed=0)
    # without an image of each step nothing else fails: the hand would be at NaN until the end
    env.render_every_step = False
    with pytest.raises(ValueError, match=r"the action moves the hand by \[.*expected numbers in"):
        env.step(np.full(7, np.nan, np.float32))
    after = env.step(np.zeros(7, np.float32))[0]
    assert np.array_equal(after["state"], before["state"])


@pytest.mark.parametrize(
    "kwargs",
    [
        {"task_id": 4},
        {"task_id": True},
        {"task_id": 1.0},
        {"action_dim": 1},
        {"step_size": 0.0},
        {"step_limit": 0},
    ],
)
def test_arguments_out_of_range_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ToyReachEnv(**kwargs)


@pytest.mark.parametrize("action", [1.0, [1.0], [[1.0, 0.0]], None])
def test_an_action_that_is_no_row_of_two_numbers_is_refused_and_moves_nothing(action: Any) -> None:
    env = ToyReachEnv(action_dim=2)
    before, _ = env.reset(seed=0)
    with pytest.raises(ValueError, match=r"the action has shape .*, expected \(2,\)"):
        env.step(np.asarray(action, np.float32))
    assert env.get_state()["num_steps"] == 0
    np.testing.assert_array_equal(env.get_state()["hand"].astype(np.float32), before["state"])


def test_extra_action_dimensions_change_nothing() -> None:
    env = make()
    env.reset(seed=5)
    state = env.get_state()
    plain = env.step(np.array([1, 0, 0, 0, 0, 0, 0], np.float32))[0]
    env.set_state(state)
    noisy = env.step(np.array([1, 0, 1, -1, 1, -1, 1], np.float32))[0]
    assert np.array_equal(plain["image"], noisy["image"])


def test_rendering_gives_a_large_image_only_on_request() -> None:
    env = make(render_mode="rgb_array")
    env.reset(seed=0)
    image = env.render()
    assert image is not None
    assert image.shape == (256, 256, 3)
    assert make().render() is None


IDLE = np.zeros(7, np.float32)


def test_a_fault_comes_at_its_step_and_no_more_often_than_asked_for() -> None:
    env = FaultyEnv("raise", at_step=2, times=1)
    env.reset(seed=0)
    env.step(IDLE)
    with pytest.raises(RuntimeError, match="as it was told to"):
        env.step(IDLE)
    env.reset(seed=0)
    env.step(IDLE)
    env.step(IDLE)


def test_step_zero_is_the_reset() -> None:
    env = FaultyEnv("raise", at_step=0)
    with pytest.raises(RuntimeError):
        env.reset(seed=0)
    env.reset(seed=0)


def test_a_ledger_counts_faults_of_processes_that_came_before(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError):
            FaultyEnv("raise", at_step=0, times=2, ledger=str(tmp_path)).reset(seed=0)
    FaultyEnv("raise", at_step=0, times=2, ledger=str(tmp_path)).reset(seed=0)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("fault", ["wrong_shape", "wrong_dtype", "missing_key"])
def test_an_observation_at_fault_is_not_of_its_space(fault: str) -> None:
    env = FaultyEnv(fault, at_step=1)
    assert env.observation_space.contains(env.reset(seed=0)[0])
    assert not env.observation_space.contains(env.step(IDLE)[0])


def test_a_reward_at_fault_is_no_number() -> None:
    env = FaultyEnv("not_finite_reward", at_step=1)
    env.reset(seed=0)
    assert np.isnan(env.step(IDLE)[1])
    assert np.isfinite(env.step(IDLE)[1])


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="fault is 'sulks', expected one of raise, no_start"):
        FaultyEnv("sulks")
