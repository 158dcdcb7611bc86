"""A scripted expert suggests an action in every observation, and a policy can follow it."""

from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.envs.experts import ExpertPolicy, ExpertSuggestions
from vla_rl.envs.image_env import ImageEnv


class Expert:
    """Suggests the number of the action since the start of the episode."""

    def begin(self) -> None:
        self._number = 0

    def act(self) -> np.ndarray:
        self._number += 1
        return np.full(2, self._number, np.float64)


class Arm(gymnasium.Env[dict[str, Any], np.ndarray]):
    """An environment with an expert."""

    observation_space = spaces.Dict({"state": spaces.Box(-1.0, 1.0, (1,), np.float32)})
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def make_expert(self) -> Expert:
        return Expert()

    def reset(self, **_: Any) -> Any:
        return {"state": np.zeros(1, np.float32)}, {}

    def step(self, action: np.ndarray) -> Any:
        return {"state": np.ones(1, np.float32)}, 1.0, False, True, {}


def suggesting() -> ExpertSuggestions:
    return ExpertSuggestions(cast(ImageEnv, Arm()))


def test_every_observation_has_the_experts_next_action() -> None:
    env = suggesting()
    assert isinstance(env.observation_space, spaces.Dict)
    assert env.observation_space["expert_action"] == Arm.action_space
    observation, _ = env.reset()
    assert observation["expert_action"].tolist() == [1.0, 1.0]
    observation, reward, terminated, truncated, _ = env.step(np.zeros(2, np.float32))
    assert observation["expert_action"].tolist() == [2.0, 2.0]
    assert (reward, terminated, truncated) == (1.0, False, True)
    assert env.reset()[0]["expert_action"].tolist() == [1.0, 1.0]


async def test_the_policy_follows_the_suggestion_and_chooses_no_tokens() -> None:
    chunk = await ExpertPolicy().act({"expert_action": np.array([0.5, -0.5])})
    assert chunk.actions.dtype == np.float32
    assert chunk.actions.tolist() == [[0.5, -0.5]]
    assert chunk.tokens.size == chunk.log_probs.size == 0


async def test_an_environment_without_suggestions_is_named() -> None:
    with pytest.raises(ValueError, match=r"the observation has \['state'\], expected expert_act"):
        await ExpertPolicy().act({"state": np.zeros(1)})
