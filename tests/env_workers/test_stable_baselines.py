"""stable-baselines3 sees through our adapter exactly what its own vector environment shows it."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from vector_parts import assert_same

from vla_rl.env_workers import SimulatorConfig, make_vec

pytest.importorskip("stable_baselines3", reason="stable-baselines3 is in the extra `bench`")
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

from vla_rl.env_workers.stable_baselines import Sb3VecEnv, make_sb3_vec

NUM_ENVS = 3


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
@pytest.mark.parametrize("per_process", [1, NUM_ENVS])
def test_two_hundred_steps_equal_those_of_its_own_dummy_vec_env(
    env_id: str, per_process: int
) -> None:
    ours = make_sb3_vec(env_id, NUM_ENVS, config=SimulatorConfig(envs_per_process=per_process))
    theirs = DummyVecEnv([lambda: gymnasium.make(env_id)] * NUM_ENVS)
    try:
        for envs in (ours, theirs):
            envs.seed(5)
        assert_same(ours.reset(), theirs.reset(), "reset")
        theirs.action_space.seed(1)
        num_ended = 0
        for number in range(210):
            actions = np.array([theirs.action_space.sample() for _ in range(NUM_ENVS)])
            of_theirs = theirs.step(actions)
            assert_same(ours.step(actions), of_theirs, f"step {number}")
            num_ended += int(of_theirs[2].sum())
        assert num_ended >= NUM_ENVS
        assert_same(ours.reset_infos, theirs.reset_infos, "infos of the last resets")
    finally:
        ours.close()
        theirs.close()


def test_it_asks_and_sets_attributes_and_knows_wrappers() -> None:
    envs = make_sb3_vec("CartPole-v1", NUM_ENVS)
    try:
        envs.set_attr("gravity", 5.0, indices=[0, 2])
        assert envs.get_attr("gravity") == [5.0, 9.8, 5.0]
        assert envs.env_is_wrapped(gymnasium.wrappers.TimeLimit) == [True] * NUM_ENVS
        assert envs.env_is_wrapped(gymnasium.wrappers.ClipReward, indices=1) == [False]
        assert not envs.has_attr("no_such_thing")
    finally:
        envs.close()


def test_it_renders_all_environments_into_one_image() -> None:
    envs = make_sb3_vec("vla_rl.envs:vla_rl/toy_reach-v0", NUM_ENVS, render_mode="rgb_array")
    try:
        assert envs.render_mode == "rgb_array"
        envs.reset()
        image: Any = envs.render()
        assert image.shape == (512, 512, 3)  # four tiles of 256 x 256, one of them empty
    finally:
        envs.close()


def test_another_mode_of_beginning_episodes_is_refused() -> None:
    envs = make_vec("CartPole-v1", 1)
    with pytest.raises(ValueError, match=r"expected SAME_STEP, .* use make_sb3_vec"):
        Sb3VecEnv(envs)
    envs.close()


def test_its_ppo_trains_through_the_adapter() -> None:
    envs = VecMonitor(make_sb3_vec("CartPole-v1", 4, config=SimulatorConfig(envs_per_process=4)))
    try:
        model = PPO("MlpPolicy", envs, n_steps=64, batch_size=64, n_epochs=1, device="cpu", seed=0)
        model.learn(512)
        assert len(model.ep_info_buffer) > 0
    finally:
        envs.close()
