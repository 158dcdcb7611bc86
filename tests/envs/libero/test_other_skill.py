"""Episodes that begin in a scene which another skill has moved, and demonstrations from such starts."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.experts import expert
from vla_rl.envs.libero.experts.motions import Goal
from vla_rl.envs.libero.scene import Scene
from vla_rl.errors import ConfigError, StartError
from vla_rl.recipes.record_demonstrations import (
    RecordConfig,
    record_task,
    task_folder,
    write_settings,
)

BOTTLE_ON_CABINET, STOVE, BOWL_ON_PLATE = 2, 7, 8
STOVE_IS_ON = ["turnon", "flat_stove_1"]


@pytest.fixture
def bowl_after_stove() -> Iterator[LiberoEnv]:
    with contextlib.closing(make_env(STOVE)) as env:
        yield env


def make_env(
    after_task: int | None = None, suite: str = "libero_goal", task: int = BOWL_ON_PLATE
) -> LiberoEnv:
    return LiberoEnv(
        suite,
        task,
        "stand-ins",
        image_size=16,
        wrist_image=False,
        physics="fast",
        quality="fast",
        after_task=after_task,
    )


def test_an_episode_begins_where_another_skill_ended(bowl_after_stove: LiberoEnv) -> None:
    env = bowl_after_stove
    observation, info = env.reset(options={"init_state_id": 0})
    assert env.scene.holds(STOVE_IS_ON)
    # what acted first is no part of the episode
    assert info["num_steps"] == 0
    assert info["after_task"] == STOVE
    assert not info["is_success"]
    assert observation["instruction"] == "put the bowl on the plate"
    env.step(np.zeros(7, np.float32))
    again, _ = env.reset(options={"init_state_id": 0})
    np.testing.assert_array_equal(again["state"], observation["state"])
    np.testing.assert_array_equal(again["image"], observation["image"])


def test_the_hand_is_open_and_home_again(bowl_after_stove: LiberoEnv) -> None:
    with contextlib.closing(make_env()) as without:
        home, _ = without.reset(options={"init_state_id": 0})
    observation, _ = bowl_after_stove.reset(options={"init_state_id": 0})
    # initial states differ by a centimetre, and the way home ends 1.5 cm from it
    np.testing.assert_allclose(observation["state"][:3], home["state"][:3], atol=0.03)
    np.testing.assert_allclose(observation["state"][-2:], home["state"][-2:], atol=0.002)


def test_a_skill_that_comes_undone_on_the_way_home_is_no_start(
    bowl_after_stove: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(scene: Scene) -> Iterator[np.ndarray]:
        joint = scene.model.joint("flat_stove_1_button")
        scene.data.qpos[joint.qposadr] = 0.0
        yield np.zeros(7, np.float32)

    monkeypatch.setattr(expert, "return_home", spoil)
    with pytest.raises(
        StartError, match="turnon flat_stove_1 came undone while the hand went home"
    ):
        bowl_after_stove.reset(options={"init_state_id": 0})


def test_an_arm_that_has_put_a_bottle_on_the_cabinet_can_go_on() -> None:
    # farther from the robot, the elbow would be straight, and would stay so
    with contextlib.closing(make_env(BOTTLE_ON_CABINET, task=STOVE)) as env:
        env.reset(options={"init_state_id": 0})
        acting, is_over, info = env.make_expert(), False, dict[str, object]()
        while not is_over:
            _, _, terminated, truncated, info = env.step(acting.act())
            is_over = terminated or truncated
    assert info["is_success"]


def test_an_expert_that_does_not_get_there_is_no_start(
    bowl_after_stove: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert, "get_step_limit", lambda suite: 5)
    with pytest.raises(StartError, match="did not reach turnon flat_stove_1 in 5 control steps"):
        bowl_after_stove.reset(options={"init_state_id": 0})


def test_a_task_that_is_solved_before_it_begins_is_no_start(
    bowl_after_stove: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert, "read_goals", lambda scene: [Goal("turnon", "flat_stove_1", None)])
    with pytest.raises(StartError, match="has solved libero_goal/8; choose another after_task"):
        bowl_after_stove.reset(options={"init_state_id": 0})


def test_the_other_task_is_another_one_in_the_same_scene() -> None:
    with pytest.raises(ValueError, match="after_task is 8, expected another task of libero_goal"):
        make_env(BOWL_ON_PLATE)
    with pytest.raises(
        ValueError, match=r"after_task is 0, expected .* in the scene of libero_10/8"
    ):
        make_env(0, suite="libero_10")


@pytest.mark.parametrize("after_tasks", [(STOVE,), (99,)])
def test_the_recorder_refuses_tasks_that_cannot_act_first(after_tasks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"another task besides 7|task_id is 99"):
        RecordConfig(suite="libero_goal", task_ids=(STOVE,), after_tasks=after_tasks)


@pytest.mark.slow
def test_a_demonstration_after_another_skill_names_it_and_replays_to_success(
    tmp_path: Path,
) -> None:
    config = RecordConfig(
        out=str(tmp_path),
        suite="libero_goal",
        task_ids=(BOWL_ON_PLATE,),
        after_tasks=(STOVE,),
        num=1,
        image_size=16,
        wrist_image=False,
        quality="fast",
        assets="stand-ins",
    )
    write_settings(config, find_assets("stand-ins"))
    record_task(config, BOWL_ON_PLATE)
    with np.load(task_folder(config, BOWL_ON_PLATE) / "0000.npz", allow_pickle=False) as saved:
        recorded = dict(saved)
    with contextlib.closing(make_env(int(recorded["after_task"]))) as env:
        observation, _ = env.reset(options={"init_state_id": int(recorded["init_state_id"])})
        np.testing.assert_array_equal(observation["image"], recorded["image"][0])
        terminated = False
        for action in recorded["executed_action"]:
            assert not terminated
            _, _, terminated, _, _ = env.step(action)
    assert terminated
