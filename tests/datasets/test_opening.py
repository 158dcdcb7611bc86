"""What all layouts of data sets have in common when they are opened; LIBERO's HDF5 files, our own recordings."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from made_datasets import copy_rlds, hdf5, made_episode, published, recording

from vla_rl.datasets import (
    DatasetOptions,
    LeRobotWriter,
    compute_statistics,
    open_dataset,
    read_hdf5,
    read_recording,
)
from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.datasets.lerobot.writing import Stats, _compute_pixel_stats, merge_stats, read_stats
from vla_rl.datasets.opening import read_image_settings
from vla_rl.errors import DataError

MOVE = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
STILL = [0.0] * 6


def actions(*rows: tuple[list[float], float]) -> np.ndarray:
    return np.array([[*motion, gripper] for motion, gripper in rows])


def test_libero_s_actions_stand_beside_what_was_seen_before_them(tmp_path: Path) -> None:
    # LIBERO's tools stored in row t what came of action t: the first action has nothing before it
    stored = hdf5(tmp_path / "x_demo.hdf5", {"demo_0": actions((MOVE, -1), (MOVE, -1), (MOVE, 1))})
    (episode,) = read_hdf5(tmp_path / "x_demo.hdf5")
    assert episode.instruction == "push the plate"
    assert set(episode.frames) == {"image", "wrist_image"}
    assert episode.actions[:, -1].tolist() == [-1, 1]  # of rows 1 and 2
    assert episode.actions.dtype == np.float32
    assert episode.vectors["state"].tolist() == [
        [0, 1, 2, 100, 101, 102, 200, 201], [3, 4, 5, 103, 104, 105, 202, 203],
    ]  # fmt: skip
    for step in range(2):
        assert np.array_equal(episode.frames["image"](step), stored["demo_0"][step][::-1, ::-1])


def test_idle_steps_are_left_out_with_their_frames(tmp_path: Path) -> None:
    rows = [
        (STILL, -1),
        (MOVE, -1),
        (STILL, -1),
        (STILL, 1),
        (STILL, 1),
        ([9e-5] + [0.0] * 5, 1),
        (MOVE, 1),
    ]
    stored = hdf5(tmp_path / "x_demo.hdf5", {"demo_0": actions(*rows)})
    (episode,) = read_hdf5(tmp_path / "x_demo.hdf5")
    # 0 is still before anything was kept; 3 closes the gripper; 4 and 5 repeat that
    assert episode.actions[:, -1].tolist() == [-1, 1, 1]
    assert [episode.vectors["state"][step][0] for step in range(3)] == [3 * 0, 3 * 2, 3 * 5]
    assert np.array_equal(episode.frames["image"](1), stored["demo_0"][2][::-1, ::-1])
    assert read_hdf5(tmp_path / "x_demo.hdf5", keep_idle=True)[0].num_steps == 6


@pytest.mark.parametrize("field", ["obs/eye_in_hand_rgb", "rewards"])
def test_a_field_that_is_too_short_is_named(field: str, tmp_path: Path) -> None:
    path = tmp_path / "x_demo.hdf5"
    hdf5(path, {"demo_0": actions((MOVE, -1), (MOVE, 1), (MOVE, 1))})
    with h5py.File(path, "a") as file:
        rows = file[f"data/demo_0/{field}"][:1]
        del file[f"data/demo_0/{field}"]
        file[f"data/demo_0/{field}"] = rows
    with pytest.raises(DataError, match=f"demo_0 has fields of different lengths: .*'{field}': 1"):
        read_hdf5(path)


def test_a_demonstration_of_one_action_has_nothing_to_train(tmp_path: Path) -> None:
    hdf5(tmp_path / "x_demo.hdf5", {"demo_0": actions((MOVE, -1))})
    with pytest.raises(DataError, match="has no usable action: all are idle"):
        read_hdf5(tmp_path / "x_demo.hdf5")


def test_demonstrations_come_in_order_and_are_named_by_the_file_where_it_says_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "libero_10" / "KITCHEN_SCENE3_turn_on_the_stove_demo.hdf5"
    hdf5(
        path,
        {f"demo_{n}": actions((MOVE, -1), (MOVE, -1), *[(MOVE, 1)] * n) for n in (10, 2, 0)},
        instruction=None,
    )
    episodes = open_dataset(tmp_path)
    assert [episode.num_steps for episode in episodes] == [2, 4, 12]
    assert {episode.instruction for episode in episodes} == {"turn on the stove"}


def test_files_of_openvlas_tools_show_what_was_seen_before_each_action(tmp_path: Path) -> None:
    """They say nothing of themselves, and hold each observation beside the action that
    followed it.
    """
    path = tmp_path / "turn_on_the_stove_demo.hdf5"
    stored = hdf5(path, {"demo_0": actions((MOVE, -1), (MOVE, -1), (MOVE, 1))}, instruction=None)
    (episode,) = read_hdf5(path)
    assert episode.actions[:, -1].tolist() == [-1, -1, 1]
    assert episode.vectors["state"][:, 0].tolist() == [0.0, 3.0, 6.0]
    assert (episode.frames["image"](2) == stored["demo_0"][2][::-1, ::-1]).all()


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            "data/demo_1/obs/ee_ori",
            r"demo_1 has no 'obs/ee_ori', expected LIBERO's layout; it has \['actions', 'obs/",
        ),
        ("data/demo_1/actions", "demo_1 has no 'actions'"),
        ("data", r"has no group 'data', expected LIBERO's demonstrations"),
    ],
)
def test_a_field_that_is_lost_is_named_with_its_demonstration(
    lost: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "x_demo.hdf5"
    hdf5(path, {f"demo_{number}": actions((MOVE, -1), (MOVE, -1)) for number in range(2)})
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
    np.savez_compressed(
        path, **{name: value for name, value in columns.items() if value is not None}
    )


def test_our_own_recordings_are_read(tmp_path: Path) -> None:
    save_recording(tmp_path / "libero_goal/5/0000.npz")
    (episode,) = open_dataset(tmp_path)
    assert (episode.instruction, episode.is_success, episode.about) == (
        "push",
        True,
        {"task": "libero_goal/5"},
    )
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
        (
            {"state": np.ones((3, 8), np.float32)},
            r"0000\.npz: 3 rows of 'state', expected 2 like actions",
        ),
        (
            {"image": np.zeros((1, 8, 8, 3), np.uint8)},
            r"has 1 images of 'image', expected 2, one for each action",
        ),
        (
            {"action": np.full((2, 7), np.nan, np.float32)},
            r"'actions' of control step 0 holds NaN or infinity",
        ),
    ],
)
def test_a_recording_that_lacks_something_is_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_recording(tmp_path / "0000.npz", **changed)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_each_layout_is_known_by_what_is_in_the_folder(tmp_path: Path) -> None:
    LeRobotWriter(tmp_path / "mine").add_episode(made_episode("a"))
    assert [episode.name for episode in open_dataset(tmp_path / "mine")] == ["a"]
    assert len(open_dataset(published(tmp_path / "theirs"))) == 2
    with pytest.raises(DataError, match=r"neither meta/info.json nor features.json nor .hdf5"):
        open_dataset(tmp_path / "nowhere")
    hdf5(tmp_path / "both" / "x_demo.hdf5", {"demo_0": actions((MOVE, -1))})
    save_recording(tmp_path / "both" / "0000.npz")
    with pytest.raises(DataError, match=r"holds both .hdf5 and .npz files"):
        open_dataset(tmp_path / "both")


@pytest.mark.parametrize("layout", ["ours", "lerobot", "hdf5", "rlds"])
def test_hidden_files_belong_to_no_data_set(layout: str, tmp_path: Path) -> None:
    root = tmp_path / ".cache" / "set"  # where the set itself lies may be hidden
    if layout == "ours":
        save_recording(root / "0000.npz")
    elif layout == "lerobot":
        published(root)
    elif layout == "hdf5":
        hdf5(root / "x_demo.hdf5", {"demo_0": actions((MOVE, -1), (MOVE, -1))})
    else:
        copy_rlds(root)
    expected = [episode.instruction for episode in open_dataset(root)]
    for path in [path for path in root.rglob("*") if path.is_file()]:
        # what tar on macOS adds, and what notebooks and file managers keep
        path.with_name(f"._{path.name}").write_bytes(bytes(100))
        for kept in (".ipynb_checkpoints", ".Trash-0"):
            (path.parent / kept).mkdir(exist_ok=True)
            shutil.copy(path, path.parent / kept / path.name)
        if path.parent != root:
            shutil.copytree(path.parent, root / f".{path.parent.name}", dirs_exist_ok=True)
    assert [episode.instruction for episode in open_dataset(root)] == expected


def test_only_the_first_episodes_of_each_instruction_can_be_taken(tmp_path: Path) -> None:
    published(tmp_path, (3, 2, 4, 2, 5))
    taken = open_dataset(tmp_path, DatasetOptions(max_episodes_per_task=2))
    assert [(episode.instruction.split()[0], episode.num_steps) for episode in taken] == [
        ("open", 3), ("close", 2), ("open", 4), ("close", 2),
    ]  # fmt: skip


def test_openvla_s_gripper_is_turned_into_libero_s_and_never_mistaken_for_it(
    tmp_path: Path,
) -> None:
    openvla = np.full((2, 7), 0.5, np.float32)
    openvla[:, -1] = [1.0, 0.0]  # open, close
    save_recording(tmp_path / "0000.npz", action=openvla)
    with pytest.raises(
        DataError, match=r"are in \[0, 1\], expected -1 to open; .* gripper = 'openvla'"
    ):
        open_dataset(tmp_path)
    (episode,) = open_dataset(tmp_path, DatasetOptions(gripper="openvla"))
    assert episode.actions[:, -1].tolist() == [-1.0, 1.0]
    save_recording(tmp_path / "0000.npz")
    with pytest.raises(
        DataError,
        match="gripper commands go from -1 to -1, expected 0 to 1 in OpenVLA's convention",
    ):
        open_dataset(tmp_path, DatasetOptions(gripper="openvla"))


def test_episodes_of_two_conventions_are_not_one_data_set(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path, fps=10)
    for name, commands in (("ours", [-1.0, 1.0, 1.0]), ("theirs", [1.0, 0.0, 0.0])):
        made = made_episode(name, num_steps=3)
        made.actions[:, -1] = commands
        writer.add_episode(made)
    with pytest.raises(DataError, match=r"commands of theirs are 0 and 1, .* one convention"):
        open_dataset(tmp_path)
    assert len(open_dataset(tmp_path, DatasetOptions(gripper="none"))) == 2


def test_a_last_number_that_is_no_gripper_is_left_as_it_is(tmp_path: Path) -> None:
    joints = np.full((2, 7), 0.5, np.float32)
    save_recording(tmp_path / "0000.npz", action=joints)
    with pytest.raises(DataError, match=r"or 'none' if the last number is not a gripper"):
        open_dataset(tmp_path)
    (episode,) = open_dataset(tmp_path, DatasetOptions(gripper="none"))
    assert episode.actions[:, -1].tolist() == [0.5, 0.5]
    found = compute_statistics([episode])["action"]
    assert (found["mask"], found["mean"][-1]) == ([True] * 7, 0.5)


def test_an_action_of_one_number_has_no_gripper(tmp_path: Path) -> None:
    save_recording(tmp_path / "0000.npz", action=np.float32([[0.25], [0.75]]))
    episodes = open_dataset(tmp_path)
    assert episodes[0].actions.tolist() == [[0.25], [0.75]]
    found = compute_statistics(episodes)["action"]
    assert (found["mask"], found["mean"]) == ([True], [0.5])


@pytest.mark.parametrize("shape", [(2,), (2, 2, 2)])
def test_what_is_no_vector_for_each_step_is_refused(shape: tuple[int, ...]) -> None:
    episode = made_episode("a", 2)
    with pytest.raises(
        DataError,
        match=f"a: 'depth' is {re.escape(str(list(shape)))}, expected a vector for each step",
    ):
        msgspec.structs.replace(episode, vectors={"depth": np.zeros(shape, np.float32)})
    with pytest.raises(
        DataError, match=r"a: rewards are \[2, 1\], expected a number for each step"
    ):
        msgspec.structs.replace(episode, rewards=np.zeros((2, 1), np.float32))


def test_a_camera_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"a has no images 'head', only \['image', 'wrist_image'\]"):
        made_episode("a", 2).observation(0, cameras=("image", "head"))


def test_statistics_have_the_public_form() -> None:
    episode = made_episode("a", 5)
    episode.actions[:, 0] = [0.0, 0.1, 0.2, 0.3, 0.4]
    episode.actions[:, -1] = [-1, -1, 1, 1, 1]  # open, open, close, close, close
    found = compute_statistics([episode])
    assert (found["num_transitions"], found["num_trajectories"]) == (5, 1)
    assert found["action"]["mask"] == [True] * 6 + [False]
    assert found["action"]["mean"][0] == pytest.approx(0.2)
    assert found["action"]["q01"][0] == pytest.approx(0.004)
    assert found["action"]["q99"][0] == pytest.approx(0.396)
    assert (
        found["action"]["min"][-1],
        found["action"]["max"][-1],
        found["action"]["mean"][-1],
    ) == (0, 1, 0.4)
    assert len(found["proprio"]["q99"]) == 8


@pytest.mark.parametrize("gripper", ["signed", "none"])
def test_a_last_number_that_is_hardly_ever_a_command_is_said_to_be_taken_for_one(
    gripper: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    episode = made_episode("a", 40)
    episode.actions[:, -1] = np.linspace(-0.5, 0.5, 40)
    LeRobotWriter(tmp_path / "joints").add_episode(episode)
    open_dataset(tmp_path / "joints", DatasetOptions(gripper=gripper))
    said = [
        record.getMessage()
        for record in caplog.records
        if "--data.gripper none" in record.getMessage()
    ]
    assert len(said) == (1 if gripper == "signed" else 0)


def changed(root: Path, **arrays: Any) -> Path:
    recording(root)
    with np.load(root / "0000.npz") as file:
        known = dict(file)
    np.savez(root / "0000.npz", **{**known, **arrays})
    return root / "0000.npz"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"instruction": np.array(5)}, "'instruction' is 5, expected a text"),
        ({"instruction": np.array(["a", "b"])}, "'instruction' is missing"),
        ({"instruction": np.array("half \ud835")}, "'instruction' is 'half"),
        ({"task": np.array(1.5)}, "'task' is 1.5, expected a text"),
        ({"init_state_id": np.array("3")}, "'init_state_id' is '3', expected a whole number"),
        ({"is_success": np.array("False")}, "'is_success' is 'False', expected true or false"),
        ({"is_success": np.array([True])}, "'is_success' is None, expected true or false"),
        ({"action": np.array([["1"] * 7] * 3)}, r"'action' is <U1 of shape \[3, 7\], expected num"),
        ({"state": np.array(1.0)}, r"'state' is float64 of shape \[\], expected numbers"),
        ({"image": np.zeros((3, 8, 8, 3))}, r"'image' is float64 of shape .* expected images"),
        ({"image": np.array([{}] * 3)}, "'image' holds Python objects"),
    ],
)
def test_an_array_of_another_kind_is_refused(
    arrays: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, **arrays)
    with pytest.raises(DataError, match=r"0000\.npz.*" + message):
        read_recording(path)


def test_settings_that_are_of_other_types_are_refused_with_their_file(tmp_path: Path) -> None:
    (tmp_path / "a.settings.json").write_text('{"image_size": 84, "quality": "fast", "x": 1}')
    assert read_image_settings(tmp_path) == {
        "image_size": 84,
        "quality": "fast",
        "assets": None,
    }
    (tmp_path / "a.settings.json").write_text('{"image_size": "84"}')
    with pytest.raises(DataError, match=r"a\.settings\.json is not the settings.*image_size"):
        read_image_settings(tmp_path)


def test_statistics_of_episodes_of_different_widths_are_refused_with_both(tmp_path: Path) -> None:
    seven = read_recording(changed(tmp_path / "seven"))
    six = read_recording(changed(tmp_path / "six", action=np.zeros((3, 6))))
    with pytest.raises(DataError, match=r"'actions' has 6 numbers in .*six.* and 7 in .*seven"):
        compute_statistics([seven, six])
    wide = read_recording(changed(tmp_path / "wide", state=np.zeros((3, 9))))
    with pytest.raises(DataError, match=r"'state' has 9 numbers in .*wide.* and 8 in .*seven"):
        compute_statistics([seven, wide])
    with pytest.raises(DataError, match="no episode to compute statistics of"):
        compute_statistics([])


def episode(actions: list[list[float]], *, gripper: bool = True, **vectors) -> RecordedEpisode:
    return RecordedEpisode(
        name="one",
        instruction="go",
        actions=np.array(actions, np.float32),
        vectors={key: np.array(values, np.float32) for key, values in vectors.items()},
        frames={},
        has_gripper=gripper,
    )


def test_the_gripper_counts_from_zero_to_one_and_is_not_scaled() -> None:
    found = compute_statistics([episode([[1.0, 1.0], [3.0, -1.0]]), episode([[5.0, -1.0]])])
    assert found["num_transitions"] == 3
    assert found["num_trajectories"] == 2
    action = found["action"]
    assert action["mask"] == [True, False]
    # +1 closes, which is 0; -1 opens, which is 1
    assert action["mean"] == pytest.approx([3.0, 2 / 3])
    assert (action["min"], action["max"]) == ([1.0, 0.0], [5.0, 1.0])
    assert action["std"] == pytest.approx([(8 / 3) ** 0.5, (2 / 9) ** 0.5])
    assert action["q01"][0] == pytest.approx(1.04)  # 1 % of the way along two steps of 2
    assert action["q99"][0] == pytest.approx(4.96)


def test_without_a_gripper_all_numbers_are_scaled() -> None:
    found = compute_statistics([episode([[1.0, 1.0], [3.0, -1.0]], gripper=False)])
    assert found["action"]["mask"] == [True, True]
    assert found["action"]["mean"] == [2.0, 0.0]


def test_states_are_reported_only_if_every_episode_has_them() -> None:
    with_state = episode([[0.0, 1.0]], state=[[4.0, 5.0, 6.0]])
    without = episode([[0.0, 1.0]])
    assert compute_statistics([with_state])["proprio"]["max"] == [4.0, 5.0, 6.0]
    assert "proprio" not in compute_statistics([with_state, without])
    assert "proprio" not in compute_statistics([with_state], state_key="joints")


def test_the_recorded_actions_stay_as_they_are_and_the_numbers_are_plain() -> None:
    one = episode([[1.0, 1.0]])
    json.dumps(compute_statistics([one]))
    assert one.actions.tolist() == [[1.0, 1.0]]


ROWS = st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=1, max_size=8)


def assert_close(found: Stats, expected: Stats) -> None:
    assert found.count == expected.count
    for name in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), atol=1e-5, err_msg=name
        )


def test_statistics_by_hand() -> None:
    found = Stats.from_rows(np.array([[1, 10], [3, 10]], np.int64))
    assert found.min.tolist() == [1.0, 10.0]
    assert found.max.tolist() == [3.0, 10.0]
    assert found.mean.tolist() == [2.0, 10.0]
    assert found.std.tolist() == [1.0, 0.0]
    assert found.count == 2


@given(ROWS, ROWS)
def test_both_parts_together_have_the_statistics_of_all_rows(one: list, other: list) -> None:
    a, b = np.array(one), np.array(other)
    together = Stats.from_rows(a).with_more(Stats.from_rows(b))
    assert_close(together, Stats.from_rows(np.concatenate([a, b])))


def test_plain_values_give_the_statistics_back() -> None:
    stats = Stats.from_rows(np.array([[1.0, 2.0], [5.0, 4.0]]))
    assert_close(Stats.from_values(stats.values(), "here"), stats)


def test_a_feature_of_one_part_alone_keeps_its_statistics() -> None:
    one, other = Stats.from_rows(np.array([[1.0]])), Stats.from_rows(np.array([[3.0]]))
    found = merge_stats({"a": one}, {"a": other, "b": other})
    assert found["a"].mean.tolist() == [2.0]
    assert found["b"] is other


def test_pixels_are_scaled_to_one_and_counted_by_frame() -> None:
    pixels = np.array([[0, 255, 51], [255, 255, 153]], np.uint8)
    found = _compute_pixel_stats(pixels, num_frames=1)
    assert found.mean.shape == (3, 1, 1)
    assert found.mean[:, 0, 0] == pytest.approx([0.5, 1.0, 0.4])
    assert found.std[:, 0, 0] == pytest.approx([0.5, 0.0, 0.2])
    assert found.min[:, 0, 0] == pytest.approx([0.0, 1.0, 0.2])
    assert found.count == 1


def test_statistics_that_another_program_did_not_write_are_missed_by_name(tmp_path: Path) -> None:
    row = {f"stats/action/{kind}": [1.0] for kind in ("min", "max", "mean", "count")}
    with pytest.raises(DataError, match=r"no 'stats/action/std' of episode 4, expected statistics"):
        read_stats({**row, "episode_index": 4}, ["action"], tmp_path)
    found = read_stats({**row, "stats/action/std": [0.5]}, ["action"], tmp_path)
    assert found["action"].std.tolist() == [0.5]
