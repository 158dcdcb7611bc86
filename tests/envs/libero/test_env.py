"""`LiberoEnv` on real assets: equal to robosuite, the same start everywhere, honest about endings
and bad input.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_rl.env_workers.checked_env import CheckedEnv, run_chunk
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.assets import find_assets
from vla_rl.types import EnvSpec

INIT_STATE_ID = 3
EXPERT_EPISODE = Path(__file__).parent / "support" / "expert_episode.npy"
IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def _run_episode(
    env: LiberoEnv, actions: np.ndarray, init_state_id: int = INIT_STATE_ID
) -> list[dict[str, Any]]:
    observations = [env.reset(options={"init_state_id": init_state_id})[0]]
    return observations + [env.step(action)[0] for action in actions]


def _open_the_stove(env: LiberoEnv) -> None:
    """Turn the knob of `libero_goal` task 7 by hand to just before it lights, with some speed."""
    joint = next(
        j
        for j in range(env.scene.model.njnt)
        if env.scene.model.joint(j).name == "flat_stove_1_button"
    )
    env.scene.data.qpos[env.scene.model.jnt_qposadr[joint]] = 0.49
    env.scene.data.qvel[env.scene.model.jnt_dofadr[joint]] = 2.0


def test_a_used_environment_and_one_in_another_process_run_the_same_episode(
    object_env: LiberoEnv, fresh: subprocess.Popen[str], actions: Path
) -> None:
    rows = np.load(actions)[:12]
    _run_episode(object_env, rows[::-1][:6], init_state_id=8)
    ours = _run_episode(object_env, rows)
    stdout, stderr = fresh.communicate()
    assert fresh.returncode == 0, stderr
    with np.load(actions.with_name("fresh.npz")) as saved:
        theirs = dict(saved)
    np.testing.assert_array_equal([o["state"] for o in ours], theirs["state"])
    np.testing.assert_array_equal([o["image"] for o in ours], theirs["image"])
    np.testing.assert_array_equal(object_env.scene.get_state()["physics"], theirs["physics"])
    # the other process: no torch, nothing in the home folder, no log file, nothing on stderr, no
    # question on stdin
    assert stdout.strip().splitlines()[-1] == "heavy=[] written_at_home=[] log_handlers=[]"
    assert stderr == ""


# contracts/test_env_contract.py asks it of LIBERO's other quality of images
@pytest.mark.proof
def test_gymnasiums_own_checker_is_content(object_env: LiberoEnv) -> None:
    check_env(object_env, skip_render_check=True, skip_close_check=True)


def test_a_saved_state_goes_on_to_the_same_bits(object_env: LiberoEnv, actions: Path) -> None:
    rows = np.load(actions)
    _run_episode(object_env, rows[:4])
    saved = object_env.get_state()
    before = [object_env.step(row)[0] for row in rows[4:8]]
    end = object_env.get_state()
    _run_episode(object_env, rows[9:12], init_state_id=20)
    restored = object_env.set_state(saved)
    after = [object_env.step(row)[0] for row in rows[4:8]]
    np.testing.assert_equal(after, before)
    np.testing.assert_equal(object_env.get_state(), end)
    assert restored["image"].shape == (96, 96, 3)


def test_a_state_of_another_task_is_refused(object_env: LiberoEnv, goal_env: LiberoEnv) -> None:
    goal_env.reset(options={"init_state_id": 0})
    with pytest.raises(
        ValueError,
        match="the state is one of libero_goal/7, this environment has the task libero_object/1",
    ):
        object_env.set_state(goal_env.get_state())
    incomplete = {k: v for k, v in object_env.get_state().items() if k not in ("images", "rng")}
    with pytest.raises(ValueError, match=r"the state has no images, rng, expected one that get_"):
        object_env.set_state(incomplete)


OTHERWISE: dict[str, Any] = {
    "scene_seed": 3,
    "scenes": "published",
    "physics": "fast",
    "quality": "fast",
}


@pytest.fixture(scope="module")
def other_env(assets: str) -> Iterator[LiberoEnv]:
    """The task of `object_env` in another scene, with other physics and other images."""
    env = LiberoEnv("libero_object", task_id=1, image_size=96, **OTHERWISE)
    env.reset(options={"init_state_id": 5})
    yield env
    env.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scene_seed", "saved with scene_seed=0, this environment has 3"),
        ("scenes", "saved with scenes='same', this environment has 'published'"),
        ("physics", "saved with physics='exact', this environment has 'fast'"),
        ("quality", "saved with quality='exact', this environment has 'fast'"),
    ],
)
def test_a_state_of_another_scene_or_physics_is_refused_and_changes_nothing(
    object_env: LiberoEnv, other_env: LiberoEnv, name: str, message: str
) -> None:
    object_env.reset(options={"init_state_id": 4})
    state = object_env.get_state()
    # one environment serves all: the state differs from it in one thing alone
    saved = {**state, **OTHERWISE, name: state[name]}
    before = other_env.get_state()
    with pytest.raises(ValueError, match=f"{message}.*make this environment with the same value"):
        other_env.set_state(saved)
    np.testing.assert_equal(other_env.get_state(), before)


def test_a_chunk_renders_its_last_row_only_and_that_row_is_the_same(
    object_env: LiberoEnv, actions: Path
) -> None:
    rows = np.load(actions)[:3]
    every = _run_episode(object_env, rows)
    start = object_env.reset(options={"init_state_id": INIT_STATE_ID})[0]
    object_env.render_every_step = False
    try:
        skipped = object_env.step(rows[0])[0]
    finally:
        object_env.render_every_step = True
    np.testing.assert_array_equal(skipped["image"], start["image"])  # the newest image drawn
    np.testing.assert_array_equal(skipped["state"], every[1]["state"])  # the state is of the step
    np.testing.assert_array_equal(object_env.render(), every[1]["image"])  # drawn when asked for
    last, rewards, *_ = run_chunk(object_env, rows[1:])
    assert rewards.tolist() == [0.0, 0.0]
    np.testing.assert_equal(last, every[3])


def test_frames_of_chunks_are_the_images_of_every_kth_step(
    object_env: LiberoEnv, actions: Path
) -> None:
    rows = np.load(actions)[:6]
    every = _run_episode(object_env, rows)
    object_env.reset(options={"init_state_id": INIT_STATE_ID})
    last, *_, first_info = run_chunk(object_env, rows[:3], frames_every=2)
    np.testing.assert_equal(last, every[3])
    *_, second_info = run_chunk(object_env, rows[3:], frames_every=2, num_steps_before=3)
    np.testing.assert_array_equal(first_info["frames"], [every[2]["image"]])
    np.testing.assert_array_equal(second_info["frames"], [every[4]["image"], every[6]["image"]])


def test_frames_are_of_the_camera_that_is_asked_for(assets: str, actions: Path) -> None:
    env = CheckedEnv(
        EnvSpec(
            id="vla_rl/libero-v0",
            kwargs={
                "suite": "libero_object",
                "task_id": 1,
                "image_size": 96,
                "render_key": "wrist_image",
            },
        )
    )
    rows = np.load(actions)[:4]
    env.reset(seed=None, options={"init_state_id": INIT_STATE_ID})
    every = [env.step(row)[0]["wrist_image"] for row in rows]
    env.reset(seed=None, options={"init_state_id": INIT_STATE_ID})
    outcome = env.step_chunk(rows, frames_every=2)
    env.close()
    assert outcome.frames_key == "wrist_image"
    np.testing.assert_array_equal(outcome.frames, [every[1], every[3]])
    with pytest.raises(ValueError, match="render_key is 'wrist_image', expected one of 'image'"):
        LiberoEnv("libero_object", task_id=1, wrist_image=False, render_key="wrist_image")


@pytest.fixture
def quick_env(object_env: LiberoEnv) -> Iterator[LiberoEnv]:
    """`object_env` with physics that succeed at the same step, as test_stepping.py finds."""
    object_env.scene.physics = "fast"
    yield object_env
    object_env.scene.physics = "exact"


def test_a_chunk_stops_at_its_first_success(quick_env: LiberoEnv) -> None:
    object_env, rows = quick_env, np.load(EXPERT_EPISODE)
    object_env.reset(options={"init_state_id": INIT_STATE_ID})
    for start in range(0, 88, 8):
        outcome = run_chunk(object_env, rows[start : start + 8])
    _, rewards, terminated, truncated, info = outcome
    assert (terminated, info["num_steps"]) == (False, 88)
    chunk = np.concatenate([rows[88:], np.tile(rows[-1], (5, 1))])
    _, rewards, terminated, truncated, info = run_chunk(object_env, chunk)
    assert (rewards.tolist(), terminated, truncated) == ([0.0, 0.0, 1.0], True, False)
    assert (info["num_executed"], info["num_steps"], info["is_success"]) == (3, 91, True)
    with pytest.raises(RuntimeError, match="the episode has ended; call reset first"):
        run_chunk(object_env, chunk)


def test_success_ends_the_episode_with_a_reward_of_one_and_an_image(goal_env: LiberoEnv) -> None:
    start = goal_env.reset(options={"init_state_id": 1})[0]
    goal_env.render_every_step = False
    try:
        _open_the_stove(goal_env)
        observation, reward, terminated, truncated, info = goal_env.step(IDLE)
    finally:
        goal_env.render_every_step = True
    assert (reward, terminated, truncated, info["is_success"], info["num_steps"]) == (
        1.0,
        True,
        False,
        True,
        1,
    )
    assert not np.array_equal(observation["image"], start["image"])
    with pytest.raises(RuntimeError, match="the episode has ended; call reset first"):
        goal_env.step(IDLE)
    goal_env.reset(options={"init_state_id": 1})
    assert goal_env.step(IDLE)[1:4] == (0.0, False, False)


def test_the_step_limit_truncates_with_an_image_of_the_end(object_env: LiberoEnv) -> None:
    limit, object_env.step_limit = object_env.step_limit, 2
    try:
        object_env.reset(options={"init_state_id": 0})
        chunk = np.stack([IDLE] * 4)
        _, rewards, terminated, truncated, info = run_chunk(object_env, chunk)
    finally:
        object_env.step_limit = limit
    assert limit == 280
    assert (rewards.tolist(), terminated, truncated, info["num_executed"]) == (
        [0.0, 0.0],
        False,
        True,
        2,
    )
    assert not info["is_success"]


def test_the_seed_picks_the_initial_state_and_options_override_it(object_env: LiberoEnv) -> None:
    picked = [object_env.reset(seed=seed)[1]["init_state_id"] for seed in (0, 1, 0)]
    assert picked[0] == picked[2] != picked[1]
    info = object_env.reset(seed=0, options={"init_state_id": 49})[1]
    assert info == {
        "task": "libero_object/1",
        "init_state_id": 49,
        "scene_seed": 0,
        "num_steps": 0,
        "is_success": False,
        "scenes": "same",
        "physics": "exact",
        "quality": "exact",
        "assets": find_assets().source,
    }


def test_building_and_running_leave_numpys_global_generator_alone(object_env: LiberoEnv) -> None:
    np.random.seed(11)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    object_env.reset(seed=3)
    object_env.step(IDLE)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        ([0.0] * 7, TypeError, "the action is list, expected a float32 array"),
        (np.zeros(7, np.int64), TypeError, "the action is int64, expected a float32 array"),
        (np.zeros((8, 7), np.float32), ValueError, r"has shape \(8, 7\), expected \(7,\)"),
        (np.full(7, np.nan, np.float32), ValueError, r"expected numbers in \[-1, 1\]"),
        (np.full(7, 1.01, np.float32), ValueError, r"expected numbers in \[-1, 1\]"),
    ],
)
def test_a_bad_action_is_refused(
    object_env: LiberoEnv, action: Any, error: type[Exception], message: str
) -> None:
    object_env.reset(options={"init_state_id": 0})
    with pytest.raises(error, match=message):
        object_env.step(action)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_state_id": -1}, "init_state_id is -1, expected 0 to 49"),
        ({"init_state_id": True}, "init_state_id is True, expected 0 to 49"),
        ({"init_state_id": "3"}, "init_state_id is '3', expected 0 to 49"),
        ({"init_state": 3}, r"reset options \['init_state'\] are unknown"),
    ],
)
def test_a_bad_reset_option_is_refused(
    object_env: LiberoEnv, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        object_env.reset(options=options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"suite": "libero_gaol"}, "did you mean 'libero_goal'"),
        ({"suite": "libero_goal", "task_id": 10}, "task_id is 10, expected 0 to 9"),
        ({"suite": "libero_goal", "task_id": True}, "task_id is True, expected 0 to 9"),
        (
            {"suite": "libero_goal", "scene_seed": True},
            "scene_seed is True, expected a whole number >= 0",
        ),
        (
            {"suite": "libero_goal", "scenes": "publish"},
            "scenes is 'publish', expected one of 'same', 'published'",
        ),
        (
            {"suite": "libero_goal", "image_size": 8},
            "image_size is 8, expected a whole number >= 16",
        ),
        (
            {"suite": "libero_goal", "step_limit": 0},
            "step_limit is 0, expected a whole number >= 1",
        ),
        ({"suite": "libero_goal", "render_mode": "human"}, "render_mode is 'human'"),
        (
            {"suite": "libero_goal", "physics": "faster"},
            "physics is 'faster', expected one of 'exact', 'fast'",
        ),
        (
            {"suite": "libero_goal", "quality": "low"},
            "quality is 'low', expected one of 'exact', 'fast'",
        ),
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_built(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LiberoEnv(**arguments)


def test_a_closed_environment_says_so_and_closing_twice_is_fine(assets: str) -> None:
    env = LiberoEnv("libero_object", task_id=1, image_size=32)
    with pytest.raises(RuntimeError, match="no episode has begun; call reset first"):
        env.step(IDLE)
    with pytest.raises(RuntimeError, match="no episode has begun; call reset first"):
        env.render()
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="this environment is closed"):
        env.reset()
