"""Scripted experts solve tasks, suggest their actions, record demonstrations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import vla_rl.envs
from benchmarks.libero_experts import expert_lengths
from vla_rl.envs.experts import (
    CorrelatedNoise,
    ExpertPolicy,
    ExpertSuggestions,
    record_demonstration,
)
from vla_rl.envs.image_env import ImageEnv
from vla_rl.envs.libero import LiberoEnv, find_task
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.experts import Expert, not_from_above, picking
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states

Episode = tuple[str, int, int]


def proofs(*episodes: Episode) -> list[Any]:
    """Episodes of the long form: the suite has one of each of LIBERO's suites but libero_spatial.

    Of libero_object it has the one with real assets, and that of a policy, with placeholder assets.
    """
    return [pytest.param(*episode, marks=pytest.mark.proof) for episode in episodes]


EPISODES = [
    ("libero_goal", 7, 0),
    ("libero_90", 33, 2),
    *proofs(
        ("libero_object", 3, 0),
        ("libero_spatial", 5, 1),
        ("libero_goal", 0, 0),
        ("libero_goal", 9, 0),
    ),
]
SLOW_EPISODES = [
    ("libero_10", 2, 0),
    *proofs(("libero_spatial", 4, 0), ("libero_goal", 8, 0)),
]
REAL_EPISODES = [
    ("libero_object", 3, 0),
    *proofs(
        ("libero_10", 9, 0),  # a mug into the microwave, which is then shut
        ("libero_90", 35, 0),  # opens the microwave
        ("libero_spatial", 5, 1),
        ("libero_goal", 0, 0),
        ("libero_goal", 3, 0),
    ),
]


def solve(suite: str, task_id: int, init_state_id: int, assets: str) -> None:
    (length,) = expert_lengths(find_task(suite, task_id), find_assets(assets), [init_state_id])
    assert length is not None
    assert 30 < length < 300


@pytest.mark.parametrize(("suite", "task_id", "init_state_id"), EPISODES)
def test_the_expert_solves_a_task_with_placeholder_assets(
    suite: str, task_id: int, init_state_id: int
) -> None:
    solve(suite, task_id, init_state_id, "stand-ins")


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id", "init_state_id"), SLOW_EPISODES)
def test_the_expert_solves_a_harder_task_with_placeholder_assets(
    suite: str, task_id: int, init_state_id: int
) -> None:
    solve(suite, task_id, init_state_id, "stand-ins")


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id", "init_state_id"), REAL_EPISODES)
def test_the_expert_solves_a_task_with_real_assets(
    real_assets: str, suite: str, task_id: int, init_state_id: int
) -> None:
    solve(suite, task_id, init_state_id, real_assets)


@pytest.fixture
def suggesting_env() -> Iterator[gymnasium.Env[dict[str, object], np.ndarray]]:
    assert vla_rl.envs.LIBERO_SUITES
    env = gymnasium.make(
        "vla_rl/libero_object-expert-v0",
        task_id=3,
        assets="stand-ins",
        image_size=16,
        wrist_image=False,
        physics="fast",
        quality="fast",
        disable_env_checker=True,
    )
    yield env
    env.close()


async def test_the_expert_is_a_policy_like_any_other(
    suggesting_env: gymnasium.Env[dict[str, object], np.ndarray],
) -> None:
    observation, _ = suggesting_env.reset(options={"init_state_id": 0})
    suggesting_env.unwrapped.render_every_step = False  # type: ignore[attr-defined] # it reads no image
    policy, is_over = ExpertPolicy(), False
    info: dict[str, object] = {}
    while not is_over:
        chunk = await policy.act(observation)
        assert chunk.actions.shape == (1, 7)
        observation, _, terminated, truncated, info = suggesting_env.step(chunk.actions[0])
        is_over = terminated or truncated
    assert info["is_success"]


async def test_an_observation_without_suggestion_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the observation has \['state'\], expected expert_action"
    ):
        await ExpertPolicy().act({"state": np.zeros(8, np.float32)})


def test_the_expert_puts_the_cream_cheese_into_the_basket_in_spite_of_noise(
    object_env: LiberoEnv,
) -> None:
    object_env.reset(options={"init_state_id": 7})
    expert, noise = Expert(object_env.scene), CorrelatedNoise(0.25, np.random.default_rng(1))
    object_env.render_every_step = False
    try:
        terminated = truncated = False
        while not (terminated or truncated):
            *_, terminated, truncated, info = object_env.step(noise.perturbed(expert.act()))
    finally:
        object_env.render_every_step = True
    assert terminated
    assert info["is_success"]
    assert 60 < info["num_steps"] < 200


def test_an_expert_without_a_grasp_stands_still_and_says_why(
    object_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the cream cheese is a box of 36 by 56 by 15 mm
    monkeypatch.setattr(picking, "MAX_WIDTH_M", 0.01)
    object_env.reset(options={"init_state_id": 7})
    expert = Expert(object_env.scene)
    assert expert.obstacle is None
    np.testing.assert_array_equal(expert.act(), [0, 0, 0, 0, 0, 0, -1])
    assert str(expert.obstacle).startswith(
        "cream_cheese_1 cannot be grasped from above as it lies: it is wider than "
    )
    expert.start_over()
    assert expert.obstacle is None


def test_an_expert_says_what_it_cannot_put_under_the_roof_of_a_microwave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = find_task("libero_10", 9)
    scene = Scene(task, find_assets("stand-ins").path, scene_seed=0)
    try:
        scene.start_episode(read_init_states(task.init_states_file)[0])
        # the microwave opens towards -y, its door not counted, and the mug's handle faces that side
        np.testing.assert_allclose(
            not_from_above.find_entry_direction(scene, "microwave_1_heating_region"),
            [0, 1, 0],
            atol=1e-6,
        )
        monkeypatch.setattr(not_from_above, "MAX_WIDTH_M", 0.01)
        expert = Expert(scene)
        expert.act()
        assert str(expert.obstacle).startswith("white_yellow_mug_1 cannot be grasped from the side")
        monkeypatch.setattr(not_from_above, "find_entry_direction", lambda *_: None)
        expert.start_over()
        expert.act()
        assert (
            expert.obstacle == "microwave_1_heating_region has a roof, and is closed on every side"
        )
    finally:
        scene.close()


def test_a_demonstration_holds_what_was_seen_before_each_action_and_the_clean_action(
    object_env: LiberoEnv, tmp_path: Path
) -> None:
    limit, object_env.step_limit = object_env.step_limit, 4
    try:
        demonstration = record_demonstration(object_env, init_state_id=7, noise=0.25, seed=1)
    finally:
        object_env.step_limit = limit
    assert not demonstration.is_success
    start = object_env.reset(options={"init_state_id": 7})[0]
    path = tmp_path / "task" / "0000.npz"
    demonstration.write_npz(path)
    assert [file.name for file in path.parent.iterdir()] == ["0000.npz"]
    with np.load(path, allow_pickle=False) as saved:
        assert saved["image"].shape == saved["wrist_image"].shape == (4, 96, 96, 3)
        np.testing.assert_array_equal(saved["image"][0], start["image"])
        np.testing.assert_array_equal(saved["state"][0], start["state"])
        np.testing.assert_array_equal(saved["action"][0], Expert(object_env.scene).act())
        assert str(saved["instruction"]) == "pick up the cream cheese and place it in the basket"
        difference = np.abs(saved["executed_action"] - saved["action"])
        assert (difference[:, :6].max(axis=1) > 0).all()
        assert difference[:, 6].max() == 0.0


def test_noise_is_correlated_and_smaller_on_rotations() -> None:
    noise = CorrelatedNoise(0.25, np.random.default_rng(0))
    values = np.array([noise.perturbed(np.zeros(7, np.float32)) for _ in range(20000)])
    # n <- 0.7 n + 0.7 * 0.25 * randn has standard deviation 0.175 / sqrt(1 - 0.49) = 0.245, and 0.3
    # of it on rotations
    np.testing.assert_allclose(values[:, :3].std(0), 0.245, rtol=0.05)
    np.testing.assert_allclose(values[:, 3:6].std(0), 0.0735, rtol=0.05)
    assert np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1] == pytest.approx(0.7, abs=0.03)


class CountingExpert:
    """Suggests the number of the action since the start of the episode."""

    def start_over(self) -> None:
        self._number = 0

    def act(self) -> np.ndarray:
        self._number += 1
        return np.full(2, self._number, np.float64)


class Arm(gymnasium.Env[dict[str, Any], np.ndarray]):
    """An environment with an expert."""

    observation_space = spaces.Dict({"state": spaces.Box(-1.0, 1.0, (1,), np.float32)})
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def make_expert(self) -> CountingExpert:
        return CountingExpert()

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
