"""The control step of our own against robosuite's, and the start of an episode against a scene that
was just built.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv, find_task
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states

INIT_STATE_ID, NEXT_FIXTURES = 3, 1
IDLE = np.array([0, 0, 0, 0, 0, 0, -1.0])
EXPERT_EPISODE = Path(__file__).parent / "support" / "expert_episode.npy"
FAST_ERROR = 5e-3
"""Bound of docs/libero.md on positions (m, rad) over an episode."""


@pytest.fixture(scope="module")
def theirs(reference: subprocess.Popen[str], actions: Path) -> Any:
    _, stderr = reference.communicate()
    assert reference.returncode == 0, stderr
    return np.load(actions.with_name("reference.npz"))


@pytest.fixture(scope="module")
def published_env(assets: str) -> Iterator[LiberoEnv]:
    env = LiberoEnv("libero_goal", task_id=7, image_size=32, wrist_image=False, scenes="published")
    env.render_every_step = False
    yield env
    env.close()


def _states(
    scene: Scene, suite: str, task_id: int, actions: np.ndarray
) -> tuple[list[np.ndarray], list[bool]]:
    """MuJoCo's whole state after settling and after each action, and whether the goal held."""
    scene.start_episode(read_init_states(find_task(suite, task_id).init_states_file)[INIT_STATE_ID])
    for _ in range(10):
        is_success = scene.run_control_step(IDLE)
    states, successes = [scene.get_state()["physics"]], [is_success]
    for action in actions:
        successes.append(scene.run_control_step(action.astype(np.float64)))
        states.append(scene.get_state()["physics"])
    return states, successes


def _require_the_same_bits(recorded: dict[str, Any], theirs: Any) -> None:
    name, task = recorded["name"], find_task(recorded["suite"], recorded["task_id"])
    scene = Scene(task, Path(recorded["assets"]), scene_seed=0)
    try:
        states, successes = _states(
            scene, recorded["suite"], recorded["task_id"], np.load(recorded["actions"])
        )
        np.testing.assert_array_equal(states, theirs[f"{name}_physics"])
        np.testing.assert_array_equal(successes, theirs[f"{name}_is_success"])
        np.testing.assert_array_equal(scene.reading.proprio, theirs[f"{name}_state"][-1])
    finally:
        scene.close()


# in the suite, a dozen steps and the next trial below have robosuite's bits, in another suite
@pytest.mark.proof
def test_every_bit_of_every_control_step_of_a_grasp_and_in_other_suites_is_robosuites(
    other_runs: list[dict[str, Any]], other_reference: subprocess.Popen[str], actions: Path
) -> None:
    _, stderr = other_reference.communicate()
    assert other_reference.returncode == 0, stderr
    with np.load(actions.with_name("other_reference.npz")) as theirs:
        for recorded in other_runs:
            _require_the_same_bits(recorded, theirs)
        assert theirs["grasp_is_success"].tolist() == [False] * 91 + [True]


def test_trial_k_of_a_published_evaluation_has_the_fixtures_of_robosuites_kth_reset(
    published_env: LiberoEnv, goal_env: LiberoEnv, actions: Path, theirs: Any
) -> None:
    for _ in range(2):  # whatever ran before
        published_env.reset(options={"init_state_id": NEXT_FIXTURES})
        for row in np.load(actions)[:12]:
            published_env.step(row)
        np.testing.assert_array_equal(
            published_env.scene.get_state()["physics"], theirs["images_next_physics"]
        )
        published_env.reset(options={"init_state_id": 3})
    goal_env.reset(options={"init_state_id": 0})
    # the first trial is that of an environment of its own
    published_env.reset(options={"init_state_id": 0})
    np.testing.assert_equal(published_env.scene.get_state(), goal_env.scene.get_state())


def test_fixtures_of_published_trials_are_up_to_centimetres_apart(published_env: LiberoEnv) -> None:
    positions = []
    for number in range(6):
        published_env.reset(options={"init_state_id": number})
        positions.append(published_env.scene.model.body("wooden_cabinet_1_main").pos.copy())
    shifts = np.linalg.norm(np.array(positions)[1:] - positions[0], axis=1)
    assert shifts.min() > 1e-4
    assert 5e-3 < shifts.max() < 3e-2


def test_observations_and_both_images_equal_robosuites_own_bit_by_bit(
    goal_env: LiberoEnv, actions: Path, theirs: Any
) -> None:
    ours = [goal_env.reset(options={"init_state_id": INIT_STATE_ID})[0]]
    ours += [goal_env.step(action)[0] for action in np.load(actions)[:12]]
    for ours_key, their_key in (
        ("state", "state"),
        ("image", "image"),
        ("wrist_image", "wrist_image"),
    ):
        np.testing.assert_array_equal([o[ours_key] for o in ours], theirs[f"images_{their_key}"])
    np.testing.assert_array_equal(
        goal_env.scene.get_state()["physics"], theirs["images_physics"][-1]
    )


def test_fast_physics_succeeds_at_the_same_step_and_stays_within_its_bound(
    object_env: LiberoEnv,
) -> None:
    scene, num_qpos = object_env.scene, object_env.scene.model.nq
    expected, exact_successes = _states(scene, "libero_object", 1, np.load(EXPERT_EPISODE))
    assert exact_successes == [False] * 91 + [True]
    scene.physics = "fast"
    try:
        states, successes = _states(scene, "libero_object", 1, np.load(EXPERT_EPISODE))
    finally:
        scene.physics = "exact"
    assert successes == exact_successes
    error = np.abs(np.array(states) - np.array(expected))[:, 1 : 1 + num_qpos]
    assert 0.0 < error.max() < FAST_ERROR


def test_a_used_scene_begins_like_one_that_was_just_built(assets: str) -> None:
    task, seed = find_task("libero_goal", 3), 5
    actions = np.random.default_rng(1).uniform(-1, 1, (6, 7))
    used, fresh = Scene(task, Path(assets), seed), Scene(task, Path(assets), seed)
    try:
        used.physics = "fast"
        _states(used, "libero_goal", 3, actions[::-1])
        used.physics = "exact"
        expected, _ = _states(fresh, "libero_goal", 3, actions)
        np.testing.assert_array_equal(_states(used, "libero_goal", 3, actions)[0], expected)
        np.testing.assert_equal(used.get_state(), fresh.get_state())
        other = Scene(task, Path(assets), seed + 1)
        # the cabinet stands elsewhere
        assert not np.array_equal(other.model.body_pos, used.model.body_pos)
        other.close()
    finally:
        used.close()
        fresh.close()


def test_a_start_takes_less_than_two_milliseconds(object_env: LiberoEnv) -> None:
    init_states = read_init_states(object_env.task.init_states_file)
    took_s = []
    for init_state in init_states:
        started = time.process_time()
        object_env.scene.start_episode(init_state)
        took_s.append(time.process_time() - started)
    assert np.median(took_s) < 0.002


# in the suite, test_processes.py compares two forks of a pool, which have too little memory for
# scenes of their own
@pytest.mark.proof
def test_a_forked_child_takes_the_prepared_scene_and_runs_the_same_episode(
    object_env: LiberoEnv, forked: subprocess.Popen[str], actions: Path
) -> None:
    ours = [object_env.reset(options={"init_state_id": INIT_STATE_ID})[0]]
    ours += [object_env.step(action)[0] for action in np.load(actions)[:12]]
    stdout, stderr = forked.communicate()
    assert forked.returncode == 0, stderr
    assert stdout.strip() == "graphics=[] num_threads=1 child=0"
    with np.load(actions.with_name("forked.npz")) as saved:
        theirs = dict(saved)
    np.testing.assert_array_equal([o["state"] for o in ours], theirs["state"])
    np.testing.assert_array_equal([o["image"] for o in ours], theirs["image"])
    assert theirs["is_kept"]


SUPPORT = Path(__file__).parent / "support"
SUITE, TASK_ID, REAL_INIT_STATE_ID = "libero_goal", 7, 11


# test_stepping.py compares the same with placeholder assets, which build in a third of the time
@pytest.mark.proof
def test_images_and_physics_on_liberos_own_assets_equal_robosuites_bit_by_bit(
    real_assets: str, tmp_path: Path
) -> None:
    rows = np.random.default_rng(4).uniform(-1, 1, (5, 7)).astype(np.float32)
    np.save(tmp_path / "actions.npy", rows)
    recorded = {
        "name": "real",
        "suite": SUITE,
        "task_id": TASK_ID,
        "init_state_id": REAL_INIT_STATE_ID,
        "assets": real_assets,
        "actions": str(tmp_path / "actions.npy"),
        "has_images": True,
    }
    (tmp_path / "runs.json").write_text(json.dumps([recorded]))
    command = [sys.executable, str(SUPPORT / "robosuite_reference.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "runs.json"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "out.npz")
    env = LiberoEnv(SUITE, TASK_ID, assets=real_assets, image_size=96)
    try:
        ours = [env.reset(options={"init_state_id": REAL_INIT_STATE_ID})[0]]
        ours += [env.step(row)[0] for row in rows]
        np.testing.assert_array_equal(env.scene.get_state()["physics"], theirs["real_physics"][-1])
    finally:
        env.close()
    for key in ("state", "image", "wrist_image"):
        np.testing.assert_array_equal([seen[key] for seen in ours], theirs[f"real_{key}"])
