"""What Meta-World itself computes for a start, and continuing from a saved state, bit by bit.

The tasks have all that a state can hide: windows into MuJoCo's data (door-lock, basketball), moved
bodies, free objects, and starts of which Meta-World rejects some.
"""

import functools
import pickle
from typing import Any

import numpy as np
import pytest

from vla_rl.env_workers.spaces import as_plain
from vla_rl.envs.metaworld.env import MetaWorldExpert
from vla_rl.envs.metaworld.scene import Scene, load_metaworld
from vla_rl.envs.metaworld.tasks import find_task

IN_THE_SUITE = ("door-lock", "pick-place", "stick-pull")
TASKS = [
    *IN_THE_SUITE,
    *(pytest.param(name, marks=pytest.mark.proof) for name in ("basketball", "drawer-open")),
]
NUM_STEPS = 40


@functools.cache
def kept_scene(name: str, number: int = 0) -> Scene:
    """One scene for all tests of a task, which build it in a third of a second."""
    return Scene(find_task("metaworld_mt50", name))


def scene_at(name: str, start: int, number: int = 0) -> Scene:
    scene = kept_scene(name, number)
    scene.start_episode(start)
    return scene


def the_packages_own(scene: Scene) -> Any:
    """Meta-World's environment, put to the start of `scene` as its users do."""
    from metaworld.types import Task

    name = f"{scene.task_name}-v3"
    made = load_metaworld().envs[name]
    env = made()
    data = {
        "env_cls": made,
        "rand_vec": scene._env._last_rand_vec.copy(),
        "partially_observable": False,
    }
    env.set_task(Task(env_name=name, data=pickle.dumps(data)))
    return env


@pytest.mark.parametrize("name", TASKS)
def test_an_episode_is_the_packages_own_whatever_ran_before(name: str) -> None:
    scene = scene_at(name, 7)
    for _ in range(5):
        scene.run_control_step(np.full(4, 0.5))
    scene.start_episode(3)
    env, expert = the_packages_own(scene), MetaWorldExpert(scene)
    observation, _ = env.reset()
    np.testing.assert_array_equal(scene.observation, observation)
    for _ in range(NUM_STEPS):
        action = expert.act()
        is_success = scene.run_control_step(action.astype(np.float64))
        observation, reward, _, _, info = env.step(action)
        np.testing.assert_array_equal(scene.observation, observation)
        assert (scene.dense_reward, is_success) == (reward, bool(info["success"]))


@pytest.mark.parametrize("name", TASKS)
def test_a_restored_state_goes_on_with_the_same_bits(name: str) -> None:
    scene = scene_at(name, 3)
    expert = MetaWorldExpert(scene)
    for _ in range(NUM_STEPS):
        scene.run_control_step(expert.act().astype(np.float64))
    state = as_plain(scene.get_state(), "state")
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 4))
    stayed = [seen_after(scene, action) for action in actions]
    elsewhere = scene_at(name, 11, number=1)
    for other in (elsewhere, scene):
        other.set_state(state)
        for action, expected in zip(actions, stayed, strict=True):
            for value, wanted in zip(seen_after(other, action), expected, strict=True):
                np.testing.assert_array_equal(value, wanted)


def seen_after(scene: Scene, action: np.ndarray) -> tuple[Any, ...]:
    is_success = scene.run_control_step(action)
    poses = [array.copy() for array in scene.drawn.values()]
    return is_success, scene.dense_reward, scene.observation.copy(), *poses


def test_different_numbers_are_different_starts() -> None:
    scene = kept_scene("pick-place")
    vectors = [scene._draw_vector(start) for start in (*range(50), 1000, 2**31 - 1)]
    assert len(np.unique(np.array(vectors), axis=0)) == len(vectors)


def test_a_task_of_two_suites_has_the_same_starts_in_both() -> None:
    of_ten = Scene(find_task("metaworld_mt10", "pick-place"))
    of_fifty = kept_scene("pick-place")
    np.testing.assert_array_equal(of_ten._draw_vector(5), of_fifty._draw_vector(5))


def test_the_first_picture_shows_bodies_where_the_reset_put_them() -> None:
    scene = scene_at("drawer-open", 0)
    poses = {}
    for start in (0, 1):
        scene.start_episode(start)
        poses[start] = scene.drawn["geom_xpos"].copy()
        assert scene.model.body("drawer").pos == pytest.approx(scene._env.data.body("drawer").xpos)
    assert np.abs(poses[0] - poses[1]).max() > 0.01
