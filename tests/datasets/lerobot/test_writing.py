"""Episodes written as a LeRobotDataset come back bit for bit, also after the writer was killed."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from made_datasets import made_episode

from vla_rl.datasets import LeRobotWriter, RecordedEpisode, read_lerobot
from vla_rl.errors import DataError


def assert_same(read: RecordedEpisode, written: RecordedEpisode) -> None:
    assert (read.name, read.instruction, read.is_success) == (
        written.name,
        written.instruction,
        written.is_success,
    )
    assert read.about == written.about
    assert np.array_equal(read.actions, written.actions)
    assert read.actions.dtype == np.float32
    assert read.vectors.keys() == written.vectors.keys()
    assert all(np.array_equal(read.vectors[key], written.vectors[key]) for key in read.vectors)
    assert read.rewards is not None
    assert written.rewards is not None
    assert np.array_equal(read.rewards, written.rewards)
    assert read.frames.keys() == written.frames.keys()
    for key, frame in read.frames.items():
        for step in range(read.num_steps):
            assert np.array_equal(frame(step), written.frames[key](step))


def test_episodes_come_back_bit_for_bit(tmp_path: Path) -> None:
    episodes = [
        made_episode("a", 5, seed=1),
        made_episode("b", 3, seed=2, instruction="turn on the stove"),
    ]
    writer = LeRobotWriter(tmp_path / "data")
    for episode in episodes:
        writer.add_episode(episode)
    for read, written in zip(read_lerobot(tmp_path / "data"), episodes, strict=True):
        assert_same(read, written)


def test_cameras_of_any_name_come_back(tmp_path: Path) -> None:
    written = made_episode("a", 3)
    more = RecordedEpisode(
        **{
            field: getattr(written, field)
            for field in written.__struct_fields__
            if field != "frames"
        },
        frames={**written.frames, "head": made_episode("b", 3, seed=9).frames["image"]},
    )
    LeRobotWriter(tmp_path).add_episode(more)
    (read,) = read_lerobot(tmp_path)
    assert_same(read, more)


def narrow_episode(name: str, seed: int = 0) -> RecordedEpisode:
    """A single number to see and a single one to do."""
    rng = np.random.default_rng(seed)
    return RecordedEpisode(
        name=name,
        instruction="slide the bar",
        actions=rng.uniform(-1, 1, (4, 1)).astype(np.float32),
        vectors={
            "state": rng.normal(size=(4, 1)).astype(np.float32),
            "gripper": np.float32([[0], [1], [1], [0]]),
        },
        frames={"image": made_episode("images", 4, seed).frames["image"]},
        rewards=np.array([0.0, 0.0, 0.5, 1.0], np.float32),
        is_success=True,
    )


def test_single_numbers_are_plain_columns_and_come_back_as_vectors_of_one(tmp_path: Path) -> None:
    written = narrow_episode("a")
    LeRobotWriter(tmp_path).add_episode(written)
    table = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    features = json.loads((tmp_path / "meta/info.json").read_text())["features"]
    noted = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    for name, values in {
        "action": written.actions,
        "observation.state": written.vectors["state"],
        "observation.gripper": written.vectors["gripper"],
    }.items():
        assert features[name]["shape"] == [1]
        assert table.column(name).to_pylist() == values[:, 0].tolist()
        assert noted[name] == {"dtype": "float32", "_type": "Value"}
    assert noted["next.reward"] == {"dtype": "float32", "_type": "Value"}
    LeRobotWriter(tmp_path).add_episode(narrow_episode("b", seed=1))  # goes on with what is there
    for read, again in zip(
        read_lerobot(tmp_path), [written, narrow_episode("b", seed=1)], strict=True
    ):
        assert (
            read.actions.shape
            == read.vectors["state"].shape
            == read.vectors["gripper"].shape
            == (4, 1)
        )
        assert_same(read, again)


def test_who_chose_an_action_comes_back_and_is_a_plain_column_of_bools(tmp_path: Path) -> None:
    mixed = msgspec.structs.replace(made_episode("a", 3), intervened=np.array([False, True, False]))
    LeRobotWriter(tmp_path).add_episode(mixed)
    table = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    assert table.column("intervened").to_pylist() == [False, True, False]
    (read,) = read_lerobot(tmp_path)
    assert read.intervened is not None
    assert read.intervened.tolist() == [False, True, False]
    assert "intervened" not in read.vectors
    with pytest.raises(DataError, match="b has the features"):  # one without the column
        LeRobotWriter(tmp_path).add_episode(made_episode("b", 3))


def test_an_intervention_for_each_action_or_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a: intervened is \[2\], expected a bool for each of 3"):
        msgspec.structs.replace(made_episode("a", 3), intervened=np.zeros(2, bool))


def test_the_description_says_what_is_there(tmp_path: Path) -> None:
    LeRobotWriter(tmp_path, fps=20, robot_type="panda").add_episode(
        made_episode("a", 5)
    ).add_episode(made_episode("b", 3, seed=7))
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 20, "panda")
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (2, 8, 1)
    assert info["splits"] == {"train": "0:2"}
    assert info["features"]["observation.images.image"] == {
        "dtype": "image", "shape": [12, 12, 3], "names": ["height", "width", "channel"],
    }  # fmt: skip
    assert info["features"]["action"]["shape"] == [7]
    second = pq.read_table(tmp_path / "data/chunk-000/file-001.parquet")
    assert second.column("index").to_pylist() == [5, 6, 7]
    assert second.column("timestamp").to_pylist() == pytest.approx([0.0, 0.05, 0.1])
    assert second.column("next.done").to_pylist() == [False, False, True]
    assert set(json.loads(second.schema.metadata[b"huggingface"])["info"]["features"]) == set(
        second.column_names
    )
    about = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-001.parquet").to_pylist()[0]
    assert (about["dataset_from_index"], about["dataset_to_index"], about["length"]) == (5, 8, 3)
    tasks = pq.read_table(tmp_path / "meta/tasks.parquet")
    assert tasks.to_pylist() == [{"task_index": 0, "task": "push the plate"}]
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]


def test_statistics_of_episodes_add_up_to_those_of_the_data_set(tmp_path: Path) -> None:
    episodes = [
        made_episode("a", 5, seed=1),
        made_episode("b", 9, seed=2),
        made_episode("c", 2, seed=3),
    ]
    for episode in episodes:
        # a writer of its own each: what was written before counts
        LeRobotWriter(tmp_path).add_episode(episode)
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    actions = np.concatenate([episode.actions for episode in episodes])
    assert stats["action"]["mean"] == pytest.approx(actions.mean(0).tolist(), abs=1e-6)
    assert stats["action"]["std"] == pytest.approx(actions.std(0).tolist(), abs=1e-6)
    assert stats["action"]["count"] == [16]
    pixels = (
        np.concatenate([[e.frames["image"](step) for step in range(e.num_steps)] for e in episodes])
        / 255.0
    )
    image = stats["observation.images.image"]
    assert np.array(image["std"]).shape == (3, 1, 1)
    assert np.ravel(image["mean"]) == pytest.approx(pixels.mean((0, 1, 2)), abs=1e-6)
    assert np.ravel(image["std"]) == pytest.approx(pixels.std((0, 1, 2)), abs=1e-5)


def test_episodes_without_images_are_written_read_and_gone_on_with(tmp_path: Path) -> None:
    episodes = [msgspec.structs.replace(made_episode(name, 3), frames={}) for name in ("a", "b")]
    for episode in episodes:
        LeRobotWriter(tmp_path).add_episode(episode)
    for read, written in zip(read_lerobot(tmp_path), episodes, strict=True):
        assert_same(read, written)


def test_another_rate_or_robot_is_refused_and_none_named_goes_on_with_what_is_there(
    tmp_path: Path,
) -> None:
    LeRobotWriter(tmp_path, fps=50, robot_type="cart").add_episode(made_episode("a"))
    LeRobotWriter(tmp_path).add_episode(made_episode("b"))
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["fps"], info["robot_type"], info["total_episodes"]) == (50, "cart", 2)
    with pytest.raises(DataError, match=r"fps is 20, .*info\.json says 50\.0, expected the same"):
        LeRobotWriter(tmp_path, fps=20)
    with pytest.raises(
        DataError, match=r"robot_type is 'panda', .*info\.json says 'cart', expected the same"
    ):
        LeRobotWriter(tmp_path, robot_type="panda")


def test_statistics_do_not_count_an_episode_that_a_killed_writer_left(tmp_path: Path) -> None:
    LeRobotWriter(tmp_path).add_episode(made_episode("a", 5))
    described = (tmp_path / "meta/info.json").read_bytes()
    LeRobotWriter(tmp_path).add_episode(made_episode("lost", 4, seed=4))
    (tmp_path / "meta/info.json").write_bytes(described)  # killed between stats.json and info.json
    LeRobotWriter(tmp_path).add_episode(made_episode("b", 3, seed=5))
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    assert stats["action"]["count"] == [8]


def test_what_a_killed_writer_left_is_replaced_by_the_next(tmp_path: Path) -> None:
    LeRobotWriter(tmp_path).add_episode(made_episode("a"))
    described = (tmp_path / "meta/info.json").read_bytes()
    LeRobotWriter(tmp_path).add_episode(made_episode("lost", seed=4))
    (tmp_path / "meta/info.json").write_bytes(described)  # killed before the episode counted
    (tmp_path / "data/chunk-000/file-002.parquet.part").write_bytes(b"half")
    writer = LeRobotWriter(tmp_path)
    assert writer.names == {"a"}
    writer.add_episode(made_episode("b", 4, seed=5))
    assert [episode.name for episode in read_lerobot(tmp_path)] == ["a", "b"]
    assert not list(tmp_path.rglob("*.part"))


def test_an_episode_is_written_once(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path).add_episode(made_episode("a"))
    with pytest.raises(DataError, match="holds 'a' already"):
        writer.add_episode(made_episode("a", seed=9))


def test_an_episode_with_other_features_is_refused(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path).add_episode(made_episode("a"))
    other = made_episode("b")
    narrow = RecordedEpisode(
        name="b",
        instruction="push",
        actions=other.actions[:, :6],
        vectors=other.vectors,
        frames=other.frames,
    )
    with pytest.raises(DataError, match=r"b has the features .* has others or other shapes"):
        writer.add_episode(narrow)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="holds other files"):
        LeRobotWriter(tmp_path)


def test_images_that_change_their_size_are_refused_with_the_step(tmp_path: Path) -> None:
    episode = made_episode("a", 3)
    sizes = {0: (12, 12), 1: (12, 12), 2: (12, 6)}
    frames = {"image": lambda step: np.zeros((*sizes[step], 3), np.uint8)}
    with pytest.raises(
        DataError,
        match=r"a: the image of control step 2 is uint8 of shape \[12, 6, 3\], expected",
    ):
        LeRobotWriter(tmp_path).add_episode(msgspec.structs.replace(episode, frames=frames))
