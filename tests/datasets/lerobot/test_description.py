"""The description of a data set is read, or the file is named with what is wrong.

Words of tasks, locations of episodes: each row its own, one source or several that agree.
"""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_datasets import FEATURES, TASKS, change_rows, columns_of, published

from vla_rl.datasets import DatasetOptions, LeRobotWriter, open_dataset, read_lerobot
from vla_rl.datasets.lerobot.layout import (
    INFO_FILE,
    Feature,
    Info,
    find_feature,
    find_training_episodes,
    get_observation_key,
    read_info,
)
from vla_rl.errors import DataError

DESCRIBED = {
    "action": {"dtype": "float32", "shape": [7]},
    "observation.state": {"dtype": "float32", "shape": [8]},
    "observation.images.front": {"dtype": "video", "shape": [64, 64, 3]},
}


def written(root: Path, **changes: Any) -> Path:
    fields = {
        "codebase_version": "v3.0",
        "total_episodes": 1,
        "total_frames": 5,
        "fps": 20,
        "data_path": "data/{chunk_index}",
        "features": DESCRIBED,
    } | changes
    (root / "meta").mkdir(exist_ok=True)
    (root / INFO_FILE).write_text(json.dumps(fields))
    return root


def test_both_published_layouts_are_read(tmp_path: Path) -> None:
    assert not read_info(written(tmp_path)).is_v2
    assert read_info(written(tmp_path, codebase_version="v2.1")).is_v2


def test_another_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"codebase_version is 'v1.6', expected v3.0 or v2.1"):
        read_info(written(tmp_path, codebase_version="v1.6"))


def test_a_folder_without_a_description_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"info.json cannot be read \(No such file"):
        read_info(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"codebase_version": "v3.0"}'])
def test_a_description_of_another_form_is_refused(content: bytes, tmp_path: Path) -> None:
    (written(tmp_path) / INFO_FILE).write_bytes(content)
    with pytest.raises(DataError, match="is not a LeRobotDataset's description in UTF-8"):
        read_info(tmp_path)


@pytest.mark.parametrize(
    ("feature", "is_image", "is_vector"),
    [
        (Feature(dtype="video", shape=(64, 64, 3)), True, False),
        (Feature(dtype="image", shape=(64, 64, 3)), True, False),
        (Feature(dtype="float32", shape=(7,)), False, True),
        (Feature(dtype="bool", shape=(1,)), False, True),
        (Feature(dtype="float32", shape=(2, 7)), False, False),
        (Feature(dtype="string", shape=(1,)), False, False),
    ],
)
def test_a_feature_is_an_image_a_vector_or_neither(
    feature: Feature, is_image: bool, is_vector: bool
) -> None:
    assert (feature.is_image, feature.is_vector) == (is_image, is_vector)


def test_an_observation_has_the_name_of_its_feature_without_the_beginning() -> None:
    assert get_observation_key("observation.images.front") == "front"
    assert get_observation_key("observation.force") == "force"
    assert get_observation_key("reward") == "reward"


def info_of(root: Path) -> Info:
    return read_info(written(root))


def test_a_known_key_is_found_under_its_names_and_another_where_it_is_said(tmp_path: Path) -> None:
    info = info_of(tmp_path)
    assert find_feature(info, tmp_path, "state", {}) == "observation.state"
    assert find_feature(info, tmp_path, "wrist_image", {}) is None
    own = {"image": "observation.images.front"}
    assert find_feature(info, tmp_path, "image", own) == "observation.images.front"


def test_two_features_of_one_key_are_refused_until_one_is_named(tmp_path: Path) -> None:
    info = info_of(tmp_path)
    info.features["state"] = info.features["observation.state"]
    with pytest.raises(
        DataError, match=r"'observation.state' and 'state', which are both known as"
    ):
        find_feature(info, tmp_path, "state", {})
    assert find_feature(info, tmp_path, "state", {"state": "state"}) == "state"


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ({"train": "0:3"}, None),
        ({"train": "0:2", "test": "2:3"}, range(2)),
        ({"train": "all", "test": "2:3"}, None),
        ({}, None),
    ],
)
def test_held_out_episodes_follow_from_the_splits(
    splits: dict[str, str], expected: range | None, tmp_path: Path
) -> None:
    info = info_of(tmp_path)
    info.splits = splits
    assert find_training_episodes(info) == expected


def test_a_feature_that_was_named_and_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no feature 'top'; it has \['action', 'obs"):
        find_feature(info_of(tmp_path), tmp_path, "image", {"image": "top"})


SIX = (6,)


def published_v2(root: Path, tasks: list[Any], episodes: list[Any] | None = None) -> Path:
    """A v2.1 data set of one episode of 2 rows; lines of `tasks` and `episodes` as given."""
    (root / "meta").mkdir()
    (root / "data/chunk-000").mkdir(parents=True)
    info = {
        "codebase_version": "v2.1",
        "total_episodes": 1,
        "total_frames": 2,
        "fps": 10,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": FEATURES,
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    episodes = episodes or [{"episode_index": 0, "tasks": [TASKS[0]], "length": 2}]
    for name, rows in (("tasks", tasks), ("episodes", episodes)):
        (root / f"meta/{name}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    table = pa.table(columns_of(0, 2, 0, 0))
    pq.write_table(table, root / "data/chunk-000/episode_000000.parquet")
    return root


def write_tasks(root: Path, **columns: list[Any]) -> Path:
    pq.write_table(pa.table(columns), root / "meta/tasks.parquet")
    return root


def write_episodes(root: Path, *rows: dict[str, Any]) -> Path:
    table = pa.Table.from_pylist(list(rows))
    pq.write_table(table, root / "meta/episodes/chunk-000/file-000.parquet")
    return root


def two_tasks(rows: list[dict[str, Any]]) -> None:
    for row in rows[3:]:
        row["task_index"] = 1


def test_each_row_has_the_words_of_its_own_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_rows(published(tmp_path, SIX), two_tasks)
    (episode,) = open_dataset(tmp_path, DatasetOptions(gripper="none"))
    assert [episode.observation(step)["instruction"] for step in range(6)] == [
        *["open the drawer"] * 3,
        *["close the drawer"] * 3,
    ]
    assert episode.instruction == "open the drawer"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'tasks' is ['open the drawer'], and the rows of episode 0 have also" in line


def test_words_that_change_are_written_row_by_row(tmp_path: Path) -> None:
    change_rows(published(tmp_path / "theirs", SIX), two_tasks)
    (episode,) = read_lerobot(tmp_path / "theirs")
    LeRobotWriter(tmp_path / "ours", fps=10).add_episode(episode)
    second = LeRobotWriter(tmp_path / "ours")
    second.add_episode(msgspec.structs.replace(episode, name="again"))
    assert [again.step_instructions for again in read_lerobot(tmp_path / "ours")] == [
        episode.step_instructions
    ] * 2
    (about,) = pq.read_table(
        tmp_path / "ours/meta/episodes/chunk-000/file-000.parquet", columns=["tasks"]
    ).to_pylist()
    assert about["tasks"] == ["open the drawer", "close the drawer"]


@pytest.mark.parametrize("name", ["task", "__index_level_0__"])
def test_another_text_column_is_not_the_task(name: str, tmp_path: Path) -> None:
    words = ["open the drawer", "close the drawer"]
    write_tasks(published(tmp_path), category=["kitchen"] * 2, task_index=[0, 1], **{name: words})
    assert [each.instruction for each in read_lerobot(tmp_path)] == words


def test_two_columns_of_words_that_differ_are_refused(tmp_path: Path) -> None:
    published(tmp_path)
    both = {"task": list(TASKS.values()), "__index_level_0__": list(TASKS.values())}
    write_tasks(tmp_path, task_index=[0, 1], **both)
    assert len(read_lerobot(tmp_path)) == 2
    both["task"] = ["open the drawer", "pull"]
    write_tasks(tmp_path, task_index=[0, 1], **both)
    with pytest.raises(DataError, match=r"words of task 1 in .*'task' says 'pull', '__index_level"):
        read_lerobot(tmp_path)


def test_a_table_without_a_column_of_words_is_refused(tmp_path: Path) -> None:
    write_tasks(published(tmp_path), task_index=[0, 1], category=["a", "b"])
    with pytest.raises(
        DataError, match=r"tasks\.parquet has the columns \['category', 'task_index'\], expected"
    ):
        read_lerobot(tmp_path)


def test_the_index_of_a_data_frame_is_the_task_whatever_its_name(tmp_path: Path) -> None:
    """LeRobot reads the index."""
    table = pa.table({"category": ["a", "b"], "task_index": [0, 1], "words": ["open", "close"]})
    note = {"pandas": json.dumps({"index_columns": ["words"]})}
    write_episodes(published(tmp_path))
    pq.write_table(table.replace_schema_metadata(note), tmp_path / "meta/tasks.parquet")
    assert [each.instruction for each in read_lerobot(tmp_path)] == ["open", "close"]


def test_a_task_with_two_texts_is_refused(tmp_path: Path) -> None:
    words = ["open the drawer", "close the drawer", "close the drawer"]
    write_tasks(published(tmp_path), task_index=[0, 1, 1], task=words)
    assert len(read_lerobot(tmp_path)) == 2
    write_tasks(tmp_path, task_index=[0, 1, 1], task=[*words[:2], "push"])
    with pytest.raises(DataError, match=r"words of task 1 say different .*row 2 says 'push'"):
        read_lerobot(tmp_path)


def test_a_list_of_tasks_that_has_none_of_an_episodes_words_is_refused(tmp_path: Path) -> None:
    write_episodes(published(tmp_path, (3,)), {"episode_index": 0, "tasks": ["fly"], "length": 3})
    with pytest.raises(
        DataError,
        match=r"task of episode 0 say different things: .*\['open the drawer'\].*says \['fly'\]",
    ):
        read_lerobot(tmp_path)


def test_a_file_of_the_other_version_has_to_agree(tmp_path: Path) -> None:
    published(tmp_path)
    other = tmp_path / "meta/tasks.jsonl"
    other.write_text('{"task_index": 0, "task": "open the drawer"}\n')
    assert len(read_lerobot(tmp_path)) == 2
    other.write_text('{"task_index": 0, "task": "fly"}\n')
    with pytest.raises(DataError, match=r"tasks\.parquet says 'open.*tasks\.jsonl says 'fly'"):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"task_index": 0}, r"'task' is missing; it has \['task_index'\], expected a text"),
        ({"task_index": 0, "task": None}, "'task' is null, expected a text"),
        ({"task_index": 0, "task": ["close", "it"]}, r"'task' is \['close', 'it'\], expected a te"),
        ({"task_index": "a", "task": "x"}, "'task_index' is 'a', expected a whole number"),
        ({"task_index": -1, "task": "x"}, "'task_index' is -1, expected a whole number"),
        ({"task_index": True, "task": "x"}, "'task_index' is True, expected a whole number"),
        (["x"], "is not lines of JSON"),
    ],
)
def test_a_line_of_tasks_that_is_wrong_is_named(line: Any, message: str, tmp_path: Path) -> None:
    published_v2(tmp_path, [line])
    with pytest.raises(DataError, match=r"meta/tasks\.jsonl, line 1.*" + message):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["open the drawer", None], "row 1: 'task' is null, expected a text"),
        ([["a"], ["b", "c"]], r"row 0: 'task' is \['a'\], expected a text"),
        ([1, 2], "row 0: 'task' is 1, expected a text"),
        ([b"\xff", b"a"], "row 0: 'task' is b'.xff', expected a text"),
    ],
)
def test_words_that_are_no_text_are_refused(words: list[Any], message: str, tmp_path: Path) -> None:
    write_tasks(published(tmp_path), task_index=[0, 1], task=words)
    with pytest.raises(DataError, match=r"meta/tasks\.parquet, " + message):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"length": 2}, "'episode_index' is missing"),
        ({"episode_index": "0"}, "'episode_index' is '0', expected a whole number"),
        ({"episode_index": 0, "length": "long"}, "'length' is 'long', expected a whole number"),
        ({"episode_index": 0, "length": 3}, "'length' 3, expected the same"),
        ({"episode_index": 0, "vla_rl/name": 7}, "'vla_rl/name' is 7, expected a text"),
        ({"episode_index": 0, "vla_rl/task": ["a"]}, r"'vla_rl/task' is \['a'\], expected"),
    ],
)
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_row_of_episodes_that_is_wrong_is_named(
    version: str, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if version == "v2.1":
        published_v2(tmp_path, [{"task_index": 0, "task": TASKS[0]}], [row])
    else:
        write_episodes(published(tmp_path, (2,)), row)
    with pytest.raises(DataError, match=message) as caught:
        read_lerobot(tmp_path)
    assert str(tmp_path / "meta/episodes") in str(caught.value)
    assert ("line 1" if version == "v2.1" else "row 0") in str(caught.value)


def test_an_episode_that_is_described_twice_is_refused(tmp_path: Path) -> None:
    rows = [{"episode_index": 0, "vla_rl/name": "a"}, {"episode_index": 0, "vla_rl/name": "b"}]
    write_episodes(published(tmp_path, (2,)), *rows)
    with pytest.raises(DataError, match="row 1 describes episode 0 again, and differently than"):
        read_lerobot(tmp_path)


def test_numbers_that_a_data_frame_made_floats_are_taken(tmp_path: Path) -> None:
    write_episodes(published(tmp_path, (2,)), {"episode_index": 0.0, "length": 2.0})

    def as_floats(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["task_index"] = float(row["task_index"])

    change_rows(tmp_path, as_floats)
    assert read_lerobot(tmp_path)[0].num_steps == 2


def test_a_file_without_rows_is_left_out(tmp_path: Path) -> None:
    published(tmp_path)
    table = pq.read_table(tmp_path / "data/chunk-000/file-000.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "data/chunk-000/file-001.parquet")
    pq.write_table(
        pa.table({"nothing": pa.array([], pa.int64())}), tmp_path / "data/chunk-000/a.parquet"
    )
    assert [each.num_steps for each in read_lerobot(tmp_path)] == [3, 4]


@pytest.mark.parametrize("total", [10**15, 2**62])
def test_a_description_that_claims_any_number_of_episodes_takes_no_memory(
    total: int, tmp_path: Path
) -> None:
    published(tmp_path, total_episodes=total)
    with pytest.raises(
        DataError, match=f"lists {total} episodes, the data files hold 2; episode 2"
    ):
        read_lerobot(tmp_path)


def test_rows_that_are_missing_or_too_many_are_noticed_by_the_description(tmp_path: Path) -> None:
    published(tmp_path, total_frames=8)
    with pytest.raises(DataError, match="lists 8 frames, the data files hold 7"):
        read_lerobot(tmp_path)
    published(tmp_path, total_frames=6)
    with pytest.raises(DataError, match=r"claims 7 rows, in row groups of .* at most the 6 frames"):
        read_lerobot(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fps", 0),
        ("fps", "10"),
        ("total_episodes", -1),
        ("chunks_size", 0),
        ("features", {"action": {"dtype": "float32", "shape": [-7]}}),
        ("features", {"action": {"dtype": None, "shape": [7]}}),
    ],
)
def test_a_description_that_is_wrong_is_refused_with_the_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    published(tmp_path, **{field: value})
    with pytest.raises(DataError, match=rf"meta/info\.json is not a LeRobot.*`\$\.{field}"):
        read_lerobot(tmp_path)


def test_a_data_set_of_one_source_gets_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        read_lerobot(published(tmp_path))
    assert not caplog.records


NAMED = ["x", "y", "z", "rx", "ry", "rz"]


@pytest.mark.parametrize(
    ("names", "is_read"),
    [
        ([*NAMED, "gripper"], True),
        ({"motors": [*NAMED, "gripper.pos"]}, True),
        (["action"], True),
        (["left_gripper", *NAMED[:5], "right_gripper"], True),
        (["gripper", *NAMED], False),
        ({"motors": ["main_gripper", *NAMED]}, False),
    ],
)
def test_a_gripper_that_is_named_has_to_be_the_last_number(
    names: Any, is_read: bool, tmp_path: Path
) -> None:
    root = published(tmp_path / "set")
    info = json.loads((root / INFO_FILE).read_text())
    info["features"]["action"]["names"] = names
    (root / INFO_FILE).write_text(json.dumps(info))
    if is_read:
        assert open_dataset(root)
    else:
        with pytest.raises(
            DataError, match=r"number 0 of 7 of an action is the gripper.*the last one"
        ):
            open_dataset(root)
        assert open_dataset(root, DatasetOptions(gripper="none"))
