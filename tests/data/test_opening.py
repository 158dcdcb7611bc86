"""LIBERO's HDF5 files, our own recordings, and what all three layouts have in common when they are opened."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from made_datasets import hdf5, made_episode, published

from vla_rl.data import DatasetOptions, LeRobotWriter, open_dataset, read_hdf5, statistics_of
from vla_rl.errors import ConfigError, DataError

MOVE = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
STILL = [0.0] * 6


def actions(*rows: tuple[list[float], float]) -> np.ndarray:
    return np.array([[*motion, gripper] for motion, gripper in rows])


def test_libero_s_frames_are_turned_and_its_state_put_together(tmp_path: Path) -> None:
    stored = hdf5(tmp_path / "x_demo.hdf5", {"demo_0": actions((MOVE, -1), (MOVE, 1))})
    (episode,) = read_hdf5(tmp_path / "x_demo.hdf5")
    assert episode.instruction == "push the plate"
    assert np.array_equal(episode.frames["image"](1), stored["demo_0"][1][::-1, ::-1])
    assert set(episode.frames) == {"image", "wrist_image"}
    assert episode.vectors["state"][1].tolist() == [3, 4, 5, 103, 104, 105, 202, 203]
    assert episode.actions[:, -1].tolist() == [-1, 1]
    assert episode.actions.dtype == np.float32


def test_idle_steps_are_left_out_with_their_frames(tmp_path: Path) -> None:
    rows = [(STILL, -1), (MOVE, -1), (STILL, -1), (STILL, 1), (STILL, 1), ([9e-5] + [0.0] * 5, 1), (MOVE, 1)]
    stored = hdf5(tmp_path / "x_demo.hdf5", {"demo_0": actions(*rows)})
    (episode,) = read_hdf5(tmp_path / "x_demo.hdf5")
    # 0 is still before anything was kept; 3 closes the gripper; 4 and 5 repeat that
    assert episode.actions[:, -1].tolist() == [-1, 1, 1]
    assert [episode.vectors["state"][step][0] for step in range(3)] == [3 * 1, 3 * 3, 3 * 6]
    assert np.array_equal(episode.frames["image"](1), stored["demo_0"][3][::-1, ::-1])
    assert read_hdf5(tmp_path / "x_demo.hdf5", keep_idle=True)[0].num_steps == 7


def test_demonstrations_come_in_order_and_are_named_by_the_file_where_it_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "libero_10" / "KITCHEN_SCENE3_turn_on_the_stove_demo.hdf5"
    hdf5(path, {f"demo_{n}": actions((MOVE, -1), *[(MOVE, 1)] * n) for n in (10, 2, 0)}, instruction=None)
    episodes = open_dataset(tmp_path)
    assert [episode.num_steps for episode in episodes] == [1, 3, 11]
    assert {episode.instruction for episode in episodes} == {"turn on the stove"}


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("data/demo_1/obs/ee_ori", r"demo_1 has no 'obs/ee_ori', expected LIBERO's layout; it has \['actions', 'obs/"),
        ("data/demo_1/actions", "demo_1 has no 'actions'"),
        ("data", r"has no group 'data', expected LIBERO's demonstrations"),
    ],
)
def test_a_field_that_is_lost_is_named_with_its_demonstration(lost: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x_demo.hdf5"
    hdf5(path, {"demo_0": actions((MOVE, -1)), "demo_1": actions((MOVE, -1))})
    with h5py.File(path, "a") as file:
        del file[lost]
    with pytest.raises(DataError, match=message):
        read_hdf5(path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x_demo.hdf5"
    hdf5(path, {"demo_0": actions((MOVE, -1))})
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match="is not a whole HDF5 file"):
        open_dataset(tmp_path)


def save_recording(path: Path, **changed: Any) -> None:
    columns = {
        "image": np.zeros((2, 8, 8, 3), np.uint8),
        "state": np.ones((2, 8), np.float32),
        "action": np.full((2, 7), -1.0, np.float32),
        "instruction": np.array("push"),
        "task": np.array("libero_goal/5"),
        "is_success": np.array(True),
        **changed,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{name: value for name, value in columns.items() if value is not None})


def test_our_own_recordings_are_read(tmp_path: Path) -> None:
    save_recording(tmp_path / "libero_goal/5/0000.npz")
    (episode,) = open_dataset(tmp_path)
    assert (episode.instruction, episode.is_success, episode.about) == ("push", True, {"task": "libero_goal/5"})
    assert episode.observation(1)["image"].shape == (8, 8, 3)


def test_a_recording_that_is_damaged_is_refused(tmp_path: Path) -> None:
    save_recording(tmp_path / "0000.npz")
    whole = (tmp_path / "0000.npz").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 4] ^= 0xFF
    for damaged in (whole[: len(whole) // 2], b"", bytes(flipped)):
        (tmp_path / "0000.npz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"0000\.npz"):
            open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": None}, r"0000\.npz is not a recorded demonstration: no 'state', only"),
        ({"state": np.ones((3, 8), np.float32)}, r"0000\.npz: 3 rows of 'state', expected 2 like actions"),
        ({"image": np.zeros((1, 8, 8, 3), np.uint8)}, r"has 1 pictures of 'image', expected 2, one for each action"),
        ({"action": np.full((2, 7), np.nan, np.float32)}, r"'actions' of control step 0 holds NaN or infinity"),
    ],
)
def test_a_recording_that_lacks_something_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_recording(tmp_path / "0000.npz", **changed)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_each_layout_is_known_by_what_is_in_the_folder(tmp_path: Path) -> None:
    LeRobotWriter(tmp_path / "mine").add(made_episode("a"))
    assert [episode.name for episode in open_dataset(tmp_path / "mine")] == ["a"]
    assert len(open_dataset(published(tmp_path / "theirs"))) == 2
    with pytest.raises(DataError, match=r"neither meta/info.json nor .hdf5 nor .npz files"):
        open_dataset(tmp_path / "nowhere")
    hdf5(tmp_path / "both" / "x_demo.hdf5", {"demo_0": actions((MOVE, -1))})
    save_recording(tmp_path / "both" / "0000.npz")
    with pytest.raises(DataError, match=r"holds both .hdf5 and .npz files"):
        open_dataset(tmp_path / "both")


def test_only_the_first_episodes_of_each_instruction_can_be_taken(tmp_path: Path) -> None:
    published(tmp_path, (3, 2, 4, 2, 5))
    taken = open_dataset(tmp_path, DatasetOptions(max_episodes_per_task=2))
    assert [(episode.instruction.split()[0], episode.num_steps) for episode in taken] == [
        ("open", 3), ("close", 2), ("open", 4), ("close", 2),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="max_episodes_per_task is 0"):
        DatasetOptions(max_episodes_per_task=0)


def test_openvla_s_gripper_is_turned_into_libero_s_and_never_mistaken_for_it(tmp_path: Path) -> None:
    openvla = np.full((2, 7), 0.5, np.float32)
    openvla[:, -1] = [1.0, 0.0]  # open, close
    save_recording(tmp_path / "0000.npz", action=openvla)
    with pytest.raises(DataError, match=r"lie in \[0, 1\], expected -1 where it opens; .* gripper = 'openvla'"):
        open_dataset(tmp_path)
    (episode,) = open_dataset(tmp_path, DatasetOptions(gripper="openvla"))
    assert episode.actions[:, -1].tolist() == [-1.0, 1.0]
    save_recording(tmp_path / "0000.npz")
    with pytest.raises(DataError, match="gripper commands go from -1 to -1, expected 0 to 1 in OpenVLA's convention"):
        open_dataset(tmp_path, DatasetOptions(gripper="openvla"))


def test_statistics_have_the_public_form() -> None:
    episode = made_episode("a", 5)
    episode.actions[:, 0] = [0.0, 0.1, 0.2, 0.3, 0.4]
    episode.actions[:, -1] = [-1, -1, 1, 1, 1]  # open, open, close, close, close
    found = statistics_of([episode])
    assert (found["num_transitions"], found["num_trajectories"]) == (5, 1)
    assert found["action"]["mask"] == [True] * 6 + [False]
    assert found["action"]["mean"][0] == pytest.approx(0.2)
    assert found["action"]["q01"][0] == pytest.approx(0.004)
    assert found["action"]["q99"][0] == pytest.approx(0.396)
    assert (found["action"]["min"][-1], found["action"]["max"][-1], found["action"]["mean"][-1]) == (0, 1, 0.4)
    assert len(found["proprio"]["q99"]) == 8
