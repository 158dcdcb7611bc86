"""What a scripted expert would do from any state, for labels of decisions that a policy made."""

from typing import Any

import numpy as np
import pytest

from vla_rl.env_workers.checked_env import run_chunk


def test_what_an_expert_plans_moves_nothing_and_is_counted_by_itself(make_small_env: Any) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 4, 7)).astype(np.float32)
    plain = make_small_env("libero_object", 3)
    planning = make_small_env("libero_object-expert", 3, expert_rows=5)
    expected, _ = plain.reset(options={"init_state_id": 0})
    observation, info = planning.reset(options={"init_state_id": 0})
    assert planning.observation_space["expert_action"].shape == (5, 7)
    assert info["planned_steps"] == 5
    for chunk in actions:
        expected, *_ = run_chunk(plain, chunk)
        observation, *_, info = run_chunk(planning, chunk)
        assert observation["expert_action"].shape == (5, 7)
        for name, value in expected.items():
            assert np.array_equal(observation[name], value), name
    # nobody reads what it would do in the middle of a chunk
    assert (info["num_steps"], info["planned_steps"]) == (8, 15)


@pytest.mark.parametrize(("suite", "task_id"), [("libero_object", 3), ("libero_goal", 7)])
def test_a_plan_goes_on_from_wherever_something_else_has_moved_the_hand(
    suite: str, task_id: int, make_small_env: Any
) -> None:
    rng = np.random.default_rng(0)
    env = make_small_env(f"{suite}-expert", task_id, expert_rows=8)
    observation, _ = env.reset(options={"init_state_id": 0})
    is_over = False
    while not is_over:
        chunk = np.array(observation["expert_action"])
        # at a third of the decisions, the hand is driven beside its way
        if rng.random() < 0.3:
            chunk[:, :3] = np.clip(chunk[:, :3] + rng.normal(0, 0.1, 3), -1, 1)
        observation, _, terminated, truncated, info = run_chunk(env, chunk)
        is_over = terminated or truncated
    assert info["is_success"]
    assert info["num_steps"] < 160


def test_no_plan_has_less_than_a_control_step(make_small_env: Any) -> None:
    with pytest.raises(ValueError, match="expert_rows is 0, expected a whole number >= 1"):
        make_small_env("libero_object-expert", 3, expert_rows=0)
