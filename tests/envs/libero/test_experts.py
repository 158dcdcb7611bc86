"""Scripted experts solve tasks, suggest their actions, record demonstrations; their geometry by hand."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

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
from vla_rl.envs.libero.experts.geometry import get_highest_on_way, get_lowest_height
from vla_rl.envs.libero.experts.motions import (
    Goal,
    get_nearest_turn,
    get_pointing,
    get_pointing_down,
    make_command,
    read_goals,
)
from vla_rl.envs.libero.experts.picking import (
    choose_grasp,
    find_pinch_grasps,
    find_rim_grasps,
    get_nearest_half_turn,
)
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


async def test_the_expert_is_a_policy_like_any_other(make_small_env: Any) -> None:
    suggesting_env = make_small_env("libero_object-expert", 3)
    observation, _ = suggesting_env.reset(options={"init_state_id": 0})
    suggesting_env.unwrapped.render_every_step = False  # it reads no image
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
    return ExpertSuggestions(cast(ImageEnv[Any], Arm()))


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


NOTHING = np.empty((0, 3))


def box(
    half: tuple[float, float, float],
    yaw: float = 0.0,
    middle: tuple[float, float, float] = (0, 0, 0),
) -> np.ndarray:
    """float64 [1, 8, 3], the corners of a box turned about the vertical."""
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    sine, cosine = np.sin(yaw), np.cos(yaw)
    turn = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    return np.asarray((signs * half @ turn.T + middle)[None])


def ring(radius: float, height: float) -> np.ndarray:
    """float64 [N, 3], points on a thin upright tube."""
    angles = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    heights = np.linspace(0, height, 20)
    return np.array([[radius * np.cos(a), radius * np.sin(a), z] for a in angles for z in heights])


def test_a_carton_is_grasped_across_its_narrow_side() -> None:
    # 4 x 10 cm, turned by 30 degrees (one of the tried yaws): 4 cm apart, across the carton
    grasp = choose_grasp(
        find_pinch_grasps(box((0.02, 0.05, 0.02), np.pi / 6)), NOTHING, 0.0, lambda _: 0.0
    )
    assert grasp is not None
    assert grasp.width_m == pytest.approx(0.04)
    assert grasp.yaw == pytest.approx(np.pi / 6)
    np.testing.assert_allclose(grasp.position, [0.0, 0.0, 0.0], atol=1e-9)


def test_what_is_wider_than_the_fingers_everywhere_has_no_pinch_grasp() -> None:
    assert find_pinch_grasps(box((0.05, 0.05, 0.05))) == []


def test_a_tube_is_grasped_across_its_wall_all_around() -> None:
    grasps = find_rim_grasps(ring(0.05, 0.06))
    assert len(grasps) == 72
    for grasp in grasps:
        assert np.linalg.norm(grasp.position[:2]) == pytest.approx(0.05, abs=0.001)
        assert grasp.position[2] == pytest.approx(0.06 - 0.018)
        outwards = grasp.position[:2] / 0.05
        assert abs(outwards @ [np.cos(grasp.yaw), np.sin(grasp.yaw)]) == pytest.approx(
            1.0, abs=0.01
        )


def test_a_full_cylinder_has_no_wall() -> None:
    disc = np.concatenate([ring(radius, 0.06) for radius in np.linspace(0.001, 0.05, 20)])
    assert find_rim_grasps(disc) == []


def test_a_neighbour_decides_on_which_side_a_bowl_is_grasped() -> None:
    wall = np.array(
        [[0.09, y, z] for y in np.linspace(-0.2, 0.2, 41) for z in np.linspace(0, 0.2, 21)]
    )
    grasp = choose_grasp(find_rim_grasps(ring(0.05, 0.06)), wall, 0.0, lambda _: 0.0)
    assert grasp is not None
    # the palm reaches 10.8 cm along the fingers and 3.6 cm across: at x = 9 cm there is room only
    # for what is far from it
    assert (
        grasp.position[0] + abs(np.cos(grasp.yaw)) * 0.108 + abs(np.sin(grasp.yaw)) * 0.036 < 0.095
    )


def test_the_palm_stays_above_what_is_below_it() -> None:
    post = np.array([[0.08, 0.0, 0.3]])
    assert get_lowest_height(post, np.zeros(2), yaw=0.0) == pytest.approx(0.3 - 0.028)
    assert get_lowest_height(post, np.zeros(2), yaw=np.pi / 2) == -np.inf


def test_the_way_is_as_high_as_what_stands_near_it() -> None:
    cloud = np.array([[0.5, 0.05, 0.7], [0.5, 0.3, 0.9]])
    assert get_highest_on_way(cloud, np.zeros(3), np.array([1.0, 0.0, 0.0]), 0.1) == 0.7


def test_the_hand_points_where_it_is_told_and_turns_the_short_way() -> None:
    rotation = get_pointing(np.array([0.0, -2.0, 0.0]), np.array([0.0, 0.3, 1.0]))
    np.testing.assert_allclose(rotation[:, 2], [0, -1, 0])
    np.testing.assert_allclose(rotation[:, 0], [0, 0, 1], atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    np.testing.assert_allclose(
        get_nearest_turn(get_pointing_down(np.pi), get_pointing_down(0.0)),
        get_pointing_down(0.0),
        atol=1e-12,
    )
    assert get_nearest_half_turn(3.0) == pytest.approx(3.0 - np.pi)


def test_a_command_is_proportional_and_clipped() -> None:
    action = make_command(np.array([0.01, -1.0, 0.0]), np.array([0.0, 0.0, 0.25]), 1.0)
    # 2.6 / 5 cm of 1 cm is 0.52, 1.2 / 0.5 rad of 0.25 rad is 0.6
    np.testing.assert_allclose(action, [0.52, -1.0, 0.0, 0.0, 0.0, 0.6, 1.0], atol=1e-6)
    assert action.dtype == np.float32


def scene(*conditions: list[str], met: tuple[list[str], ...] = ()) -> Any:
    """Return what the goals read of a scene."""
    domain = SimpleNamespace(
        parsed_problem={"goal_state": list(conditions)},
        _eval_predicate=lambda parts: parts in met,
    )
    return SimpleNamespace(domain=domain)


def test_switches_and_doors_come_before_things_and_closing_last() -> None:
    found = read_goals(
        scene(["close", "drawer"], ["on", "bowl", "plate"], ["open", "drawer"], ["turnon", "stove"])
    )
    assert [goal.predicate for goal in found] == ["turnon", "open", "on", "close"]
    assert found[2] == Goal("on", "bowl", "plate")
    assert found[0].target is None


def test_conditions_of_one_kind_keep_the_order_of_the_file() -> None:
    found = read_goals(scene(["in", "b", "basket"], ["on", "a", "plate"]))
    assert [goal.subject for goal in found] == ["b", "a"]


def test_an_unknown_condition_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"has the conditions \['stack'\], expected only turnon"):
        read_goals(scene(["stack", "a", "b"], ["on", "a", "b"]))


def test_a_goal_is_met_where_the_simulator_says_so() -> None:
    opened_scene = scene(["open", "drawer"], ["on", "a", "b"], met=(["open", "drawer"],))
    opened, targets = read_goals(opened_scene)
    assert opened.is_met(opened_scene)
    assert not targets.is_met(opened_scene)
