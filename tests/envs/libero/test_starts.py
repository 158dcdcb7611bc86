"""Starts: LIBERO's files are read without executing them, further ones are drawn by number."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv, find_task
from vla_rl.envs.libero.experts import Expert
from vla_rl.envs.libero.task_files import find_init_states, read_init_states

STATES = np.arange(6, dtype=np.float64).reshape(2, 3)


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
