"""Episodes begin at LIBERO's starts, at others drawn by number, or where another skill has left the scene.

LIBERO's files are read without executing them; demonstrations are recorded from such starts, and an
expert goes on from any state, for labels of decisions that a policy made.
"""

import contextlib
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.env_workers.checked_env import run_chunk
from vla_rl.envs.libero import LiberoEnv, find_task
from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.experts import Expert, expert
from vla_rl.envs.libero.experts.motions import Goal
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import find_init_states, read_init_states
from vla_rl.errors import ConfigError, StartError
from vla_rl.recipes.record_demonstrations import (
    RecordConfig,
    record_task,
    task_folder,
    write_settings,
)

STATES = np.arange(6, dtype=np.float64).reshape(2, 3)

BOTTLE_ON_CABINET, STOVE, BOWL_ON_PLATE = 2, 7, 8
STOVE_IS_ON = ["turnon", "flat_stove_1"]


def _saved(path: Path, program: bytes) -> Path:
    """A file as `torch.save` lays it out."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", program)
    return path


@pytest.mark.parametrize(
    ("suite", "width"), [("libero_spatial", 92), ("libero_object", 110), ("libero_goal", 79)]
)
def test_initial_states_are_50_rows_of_time_positions_and_velocities(
    suite: str, width: int
) -> None:
    states = read_init_states(find_task(suite, 0).init_states_file)
    assert states.dtype == np.float64
    assert states.shape == (50, width)
    assert np.isfinite(states).all()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("states", [STATES, STATES[:1], STATES[0]], ids=["two", "one", "one axis"])
def test_both_pickle_protocols_of_the_family_are_read(
    tmp_path: Path, protocol: int, states: np.ndarray
) -> None:
    path = _saved(tmp_path / "some.pruned_init", pickle.dumps(states, protocol=protocol))
    np.testing.assert_array_equal(read_init_states(path), np.atleast_2d(states))


def test_states_beside_no_pickle_are_found_by_the_name_of_the_task(tmp_path: Path) -> None:
    np.savez(tmp_path / "turn_on_the_stove.pruned_init.npz", states=STATES)
    found = find_init_states(tmp_path / "turn_on_the_stove", "libero_goal/7")
    np.testing.assert_array_equal(read_init_states(found), STATES)
    with pytest.raises(
        FileNotFoundError,
        match=r"libero_goal/3 has no initial states, expected .*open.* with the ending",
    ):
        find_init_states(tmp_path / "open", "libero_goal/3")


@pytest.mark.parametrize("protocol", [2, 4])
def test_initial_states_are_read_without_running_what_is_in_them(
    tmp_path: Path, protocol: int
) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(tmp_path / "exploded"), "w")

    path = _saved(tmp_path / "bad.pruned_init", pickle.dumps([Bomb(), STATES], protocol=protocol))
    with pytest.raises(ValueError, match="not a file of initial states"):
        read_init_states(path)
    objects = tmp_path / "bad.pruned_init.npz"
    np.savez(objects, states=np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a file of initial states"):
        read_init_states(objects)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "other",
    [
        STATES.astype(np.float32),
        STATES.astype(">f8"),
        np.asfortranarray(STATES),
        STATES.reshape(1, 2, 3),
        [1.0, 2.0],
    ],
    ids=["float32", "big-endian", "column by column", "three axes", "a list"],
)
def test_another_kind_of_array_is_refused(tmp_path: Path, protocol: int, other: object) -> None:
    path = _saved(tmp_path / "other.pruned_init", pickle.dumps(other, protocol=protocol))
    with pytest.raises(ValueError, match="expected one float64 array and nothing else"):
        read_init_states(path)


def test_a_file_without_a_state_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "empty.pruned_init", pickle.dumps(np.zeros((0, 3)), protocol=4))
    with pytest.raises(ValueError, match="holds no initial state, expected at least one"):
        read_init_states(path)


def test_a_shape_that_does_not_fit_the_bytes_is_refused(tmp_path: Path) -> None:
    program = pickle.dumps(STATES, protocol=4)
    assert program.count(b"K\x02K\x03\x86") == 1  # the shape: two small numbers, made a tuple
    path = _saved(
        tmp_path / "other.pruned_init", program.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86")
    )
    with pytest.raises(ValueError, match=r"holds 48 bytes for an array of shape \(2, 4\)"):
        read_init_states(path)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused(tmp_path: Path) -> None:
    path = _saved(tmp_path / "huge.pruned_init", bytes((1 << 26) + 1))
    assert path.stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="unpacks to 67108865 bytes"):
        read_init_states(path)


def test_a_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = _saved(tmp_path / "cut.pruned_init", pickle.dumps(STATES, protocol=4))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"cut\.pruned_init is damaged"):
        read_init_states(path)


IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def start(env: LiberoEnv, number: int) -> dict[str, Any]:
    env.reset(options={"init_state_id": number})
    return env.scene.get_state()


def get_position(env: LiberoEnv, body: str) -> np.ndarray:
    position: np.ndarray = env.scene.data.body(body).xpos.copy()
    return position


def test_a_drawn_start_is_fixed_by_its_number_whatever_was_run_before(
    object_env: LiberoEnv,
) -> None:
    before = start(object_env, 77)
    object_env.reset(options={"init_state_id": 3})
    object_env.step(IDLE)
    again = start(object_env, 77)
    np.testing.assert_array_equal(again["physics"], before["physics"])
    np.testing.assert_array_equal(again["body_pos"], before["body_pos"])


def test_a_scene_of_another_seed_gives_the_same_drawn_start(
    goal_env: LiberoEnv, assets: str
) -> None:
    other = LiberoEnv("libero_goal", task_id=7, image_size=32, scene_seed=5, assets=assets)
    try:
        ours, theirs = start(goal_env, 60), start(other, 60)
    finally:
        other.close()
    np.testing.assert_array_equal(ours["physics"], theirs["physics"])
    np.testing.assert_array_equal(ours["body_pos"], theirs["body_pos"])


def test_objects_and_robot_stand_elsewhere_in_every_drawn_start(object_env: LiberoEnv) -> None:
    positions, hands = [], []
    for number in range(50, 56):
        start(object_env, number)
        positions.append(get_position(object_env, "cream_cheese_1_main"))
        hands.append(object_env.scene.reading.proprio[:3].copy())
    # m; the task's region has sides of 5 mm
    assert np.ptp([xyz[:2] for xyz in positions], axis=0).min() > 0.002
    assert np.ptp(hands, axis=0).max() > 0.01  # m
    assert np.ptp([xyz[2] for xyz in positions]) < 0.005  # it lies on the floor every time


def test_fixtures_move_too(goal_env: LiberoEnv) -> None:
    stoves = []
    for number in (50, 51):
        start(goal_env, number)
        stoves.append(get_position(goal_env, "flat_stove_1_main"))
    assert np.linalg.norm(stoves[0] - stoves[1]) > 1e-3


def test_the_expert_solves_a_drawn_start(
    object_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_env, "render_every_step", False)  # the expert looks at the scene
    _, info = object_env.reset(options={"init_state_id": 1000})
    assert info["init_state_id"] == 1000
    expert = Expert(object_env.scene)
    while not info["is_success"]:
        *_, truncated, info = object_env.step(expert.act())
        assert not truncated


@pytest.mark.parametrize("number", [-1, 1 << 31, "three"])
def test_a_number_that_is_no_start_is_refused(object_env: LiberoEnv, number: Any) -> None:
    with pytest.raises(
        ValueError, match=r"expected 0 to 49, or up to 2147483647 for a start that is drawn"
    ):
        object_env.reset(options={"init_state_id": number})


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
