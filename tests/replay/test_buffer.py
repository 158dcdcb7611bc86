"""A replay buffer takes the rows of a trajectory, gives them back, drops the oldest, does what its page says."""

import re
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from episode_rows import FINAL_STATE, LAYOUT, make_episode_rows, make_trajectory

from vla_rl.errors import ConfigError, DataError
from vla_rl.replay import EpisodeRows, ReplayBuffer, ReplayConfig, make_rows
from vla_rl.replay.segments import list_segments, read_segment
from vla_rl.replay.transitions import discount_returns
from vla_rl.types import StopReason


def episode_ids(buffer: ReplayBuffer, **strata: float) -> set[int]:
    """Return the episodes that a large batch has rows of."""
    rows = buffer.sample(seed=1, update=0, batch=2000, strata=strata or {"all": 1.0})
    return set(rows["episode"].tolist())


def test_sampled_rows_are_those_of_the_episodes_and_equally_likely(tmp_path: Path) -> None:
    episodes = [make_episode_rows(number, is_success=number == 1) for number in range(3)]
    stored = {
        (row["episode"], row["decision"]): row.tobytes() for each in episodes for row in each.rows
    }
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        assert buffer.append(episodes) == [0, 1, 2]
        batch = buffer.sample(seed=1, update=0, batch=9000)
    found = [(row["episode"], row["decision"]) for row in batch]
    assert all(row.tobytes() == stored[key] for row, key in zip(batch, found, strict=True))
    # 1,000 of each of nine rows; a binomial's standard deviation is 30
    assert all(abs(found.count(key) - 1000) < 150 for key in stored)


def test_a_batch_follows_from_seed_and_update_and_begins_like_a_smaller_one(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(number) for number in range(20)])
        first = buffer.sample(seed=3, update=7, batch=64)
        assert buffer.sample(seed=3, update=7, batch=64).tobytes() == first.tobytes()
        assert buffer.sample(seed=3, update=7, batch=128)[:64].tobytes() == first.tobytes()
        assert buffer.sample(seed=3, update=8, batch=64).tobytes() != first.tobytes()
        assert buffer.sample(seed=4, update=7, batch=64).tobytes() != first.tobytes()


def test_rows_are_on_the_disk_when_append_returns(tmp_path: Path) -> None:
    episodes = [make_episode_rows(8), make_episode_rows(9)]
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append(episodes)
        (path,) = list_segments(tmp_path)
    header, _, rows = read_segment(path)
    assert header.layout == LAYOUT
    assert rows.tobytes() == b"".join(episode.rows.tobytes() for episode in episodes)


def test_an_episode_is_stored_once_whatever_is_given(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        assert buffer.append([make_episode_rows(1), make_episode_rows(1)]) == [1]
        assert buffer.append([make_episode_rows(2), make_episode_rows(1)]) == [2]
        assert buffer.append([make_episode_rows(1)], source="another run") == [1]
        assert (buffer.num_rows, buffer.num_episodes) == (9, 3)


def test_capacity_drops_the_oldest_rows_and_never_demonstrations(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(capacity=9)) as buffer:
        buffer.append([make_episode_rows(100)], is_demonstration=True, source="demos")
        for number in range(5):
            buffer.append([make_episode_rows(number)])
        assert episode_ids(buffer) == {100, 2, 3, 4}
        assert episode_ids(buffer, online=1.0) == {2, 3, 4}
        assert episode_ids(buffer, demonstrations=1.0) == {100}


def test_a_dropped_episode_is_not_stored_again(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(capacity=3)) as buffer:
        buffer.append([make_episode_rows(1)])
        buffer.append([make_episode_rows(2)])
        assert buffer.append([make_episode_rows(1)]) == []
        assert episode_ids(buffer) == {2}


def test_successes_stay_up_to_their_quota(tmp_path: Path) -> None:
    config = ReplayConfig(capacity=9, min_success_rows=3)
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        for number in range(6):
            buffer.append([make_episode_rows(number, is_success=number < 2)])
        assert episode_ids(buffer) == {1, 4, 5}


def test_a_batch_has_its_share_of_each_stratum_in_order(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(100, is_success=True)], is_demonstration=True)
        buffer.append([make_episode_rows(number, is_success=number == 0) for number in range(9)])
        batch = buffer.sample(
            seed=1,
            update=0,
            batch=10,
            strata={"demonstrations": 0.5, "failures": 0.25, "online": 0.25},
        )
    # 5 and 2.5 each: the first of two equal remainders gets the odd row
    assert (batch["episode"][:5] == 100).all()
    assert not batch["is_success"][5:8].any()
    assert (batch["episode"][5:] < 100).all()


def test_a_stratum_without_rows_is_named(tmp_path: Path) -> None:
    strata = {"successes": 0.5, "all": 0.5}
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
        assert buffer.missing_strata(strata) == ["successes"]
        with pytest.raises(DataError, match="has no row of successes among its 3"):
            buffer.sample(seed=1, update=0, batch=4, strata=strata)
        buffer.append([make_episode_rows(1, is_success=True)])
        assert buffer.missing_strata(strata) == []


@pytest.mark.parametrize(
    ("strata", "words"),
    [
        ({"wins": 1.0}, "stratum 'wins', expected all, demonstrations"),
        ({"all": 0.5}, "expected a sum of 1"),
        ({"all": 1.5, "online": -0.5}, "share of all in a batch is 1.5, expected 0 to 1"),
    ],
)
def test_impossible_shares_are_refused(tmp_path: Path, strata: dict, words: str) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer, pytest.raises(ConfigError, match=words):
        buffer.sample(seed=1, update=0, batch=4, strata=strata)


def test_rows_of_a_run_that_is_not_resumed_are_never_loaded(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0)])
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        for use in (
            buffer.start,
            lambda: buffer.append([make_episode_rows(1)]),
            lambda: buffer.sample(seed=1, update=0, batch=1),
        ):
            with pytest.raises(
                DataError, match=r"has 1 segments of rows, expected none .* existing"
            ):
                use()


def test_a_folder_belongs_to_one_buffer(tmp_path: Path) -> None:
    with (
        ReplayBuffer(tmp_path, LAYOUT),
        pytest.raises(ConfigError, match="is in use by this process"),
    ):
        ReplayBuffer(tmp_path, LAYOUT).__enter__()


def test_a_file_where_the_folder_should_be_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "my file").write_text("mine")
    for name in ("my file", "my file/rows"):
        with (
            pytest.raises(DataError, match=r"cannot be made .*; name another one"),
            ReplayBuffer(tmp_path / name, LAYOUT),
        ):
            pass
    assert (tmp_path / "my file").read_text() == "mine"


def test_rows_of_another_layout_task_or_number_are_refused(tmp_path: Path) -> None:
    wide = msgspec.structs.replace(LAYOUT, features=5)
    other = EpisodeRows(episode_id=0, task="toy/0", rows=wide.make_empty_rows(2))
    with ReplayBuffer(tmp_path, LAYOUT, ReplayConfig(capacity=4), tasks=["toy/1"]) as buffer:
        with pytest.raises(DataError, match=r"bytes each, expected .* this buffer's layout"):
            buffer.append([other])
        with pytest.raises(DataError, match=r"'toy/0', expected one of \['toy/1'\]"):
            buffer.append([make_episode_rows(0)])
        with pytest.raises(DataError, match=r"6 rows are to be stored at once, .* capacity is 4"):
            buffer.append([make_episode_rows(number, task="toy/1") for number in range(2)])
        assert list_segments(tmp_path) == []


def test_a_quota_above_the_capacity_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="min_success_rows is 10, expected less than capacity, 10"
    ):
        ReplayConfig(capacity=10, min_success_rows=10)


def test_float16_features_halve_them_and_stay_near(tmp_path: Path) -> None:
    config = ReplayConfig(features="float16")
    with ReplayBuffer(tmp_path, LAYOUT, config) as buffer:
        episode = make_episode_rows(0, layout=buffer.layout)
        buffer.append([episode])
        rows = buffer.sample(seed=1, update=0, batch=50)
    wanted = make_episode_rows(0).rows["features"]
    assert rows["features"].dtype == np.float16
    assert np.abs(rows["features"] - wanted[rows["decision"]]).max() < 2e-3


def test_tasks_of_sampled_rows_count_the_buffers_names(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        buffer.append([make_episode_rows(0, task="b"), make_episode_rows(1, task="a")])
        buffer.append([make_episode_rows(2, task="a"), make_episode_rows(3, task="c")])
        batch = buffer.sample(seed=1, update=0, batch=200)
        names = {row["episode"]: buffer.tasks[row["task"]] for row in batch}
    assert names == {0: "b", 1: "a", 2: "a", 3: "c"}


def test_metrics_are_those_of_the_live_rows(tmp_path: Path) -> None:
    with ReplayBuffer(tmp_path, LAYOUT) as buffer:
        assert buffer.metrics(3) == {"replay/rows": 0.0, "replay/waiting_rows": 0.0}
        buffer.append([make_episode_rows(0, version=2), make_episode_rows(1, version=4)])
        episode = make_episode_rows(2, version=6, is_success=True)
        episode.rows["intervened"][0] = True
        buffer.append([episode], is_demonstration=True)
        assert buffer.metrics(10) == pytest.approx(
            {
                "replay/rows": 9,
                "replay/episodes": 3,
                "replay/success_share": 1 / 3,
                "replay/demonstration_share": 1 / 3,
                "replay/intervened_share": 1 / 9,
                "replay/age": 6,
                "replay/waiting_rows": 0,
            }
        )


PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()


def test_the_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(source, "replay.md", "exec"), {})
    assert list(tmp_path.glob("*/segment-00000000.rows"))


def test_the_page_explains_every_option() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(
        ReplayConfig.__struct_fields__
    )


def test_a_row_holds_what_its_decision_saw_did_and_earned() -> None:
    trajectory = make_trajectory(decisions=3, stop=StopReason.SUCCESS, last=1)
    rows = make_rows(trajectory, LAYOUT).rows
    second = trajectory.steps[1].chunk
    assert rows["features"][1].tolist() == second.drawn["features"].tolist()
    assert rows["proprio"][1].tolist() == second.drawn["proprio"].tolist()
    assert rows["reference"][1].tolist() == second.drawn["reference"].tolist()
    assert rows["action"][1].tolist() == second.tokens.tolist()
    assert rows["num_rewards"].tolist() == [2, 2, 1]
    assert rows["rewards"].tolist() == [[0, 0], [0, 0], [1, 0]]
    assert rows["steps_to_end"].tolist() == [5, 3, 1]
    assert rows["return_to_go"].tolist() == [1, 1, 1]
    assert rows["head_version"].tolist() == [second.weight_version] * 3
    assert rows["decision"].tolist() == [0, 1, 2]
    assert rows["episode"].tolist() == [trajectory.episode.episode_id] * 3
    assert rows["is_success"].all()


def test_the_next_state_is_the_one_of_the_next_decision() -> None:
    rows = make_rows(make_trajectory(decisions=3), LAYOUT).rows
    for key in ("features", "proprio", "reference"):
        assert (rows[f"next_{key}"][:-1] == rows[key][1:]).all()


def test_a_termination_has_no_next_state_and_a_cut_has_the_final_one() -> None:
    ended = make_rows(make_trajectory(stop=StopReason.TERMINATED), LAYOUT, FINAL_STATE).rows
    assert ended["terminated"].tolist() == [False, False, True]
    assert not ended["truncated"].any()
    assert not ended["next_features"][-1].any()
    cut = make_rows(make_trajectory(stop=StopReason.TIME_LIMIT), LAYOUT, FINAL_STATE).rows
    assert cut["truncated"].tolist() == [False, False, True]
    assert not cut["terminated"].any()
    assert cut["next_features"][-1].tolist() == FINAL_STATE["features"].tolist()


def test_a_cut_episode_without_its_final_state_is_refused() -> None:
    with pytest.raises(DataError, match=r"was cut off .* 'features', expected .*describe_states"):
        make_rows(make_trajectory(stop=StopReason.TIME_LIMIT), LAYOUT)


def test_rewards_of_a_run_replace_the_environments_at_the_end_of_each_decision() -> None:
    rewards = np.array([0.25, 0.0, -1.0], np.float32)
    rows = make_rows(make_trajectory(last=1), LAYOUT, rewards=rewards).rows
    assert rows["rewards"].tolist() == [[0, 0.25], [0, 0], [-1, 0]]


def test_a_row_can_be_a_tensor_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("float16", "float32"):
        rows = msgspec.structs.replace(LAYOUT, features_dtype=dtype).make_empty_rows(2)
        for name in rows.dtype.names:
            assert torch.from_numpy(rows[name]).shape[0] == 2


def test_returns_are_discounted_by_control_steps_within_each_episode() -> None:
    rows = LAYOUT.make_empty_rows(3)
    rows["rewards"] = [[0, 1], [1, 0], [1, 1]]
    rows["num_rewards"] = [2, 1, 2]
    rows["terminated"] = [False, True, True]
    # by hand at gamma 0.5: 0 + 0.5 + 0.25 * 1; 1; 1 + 0.5
    assert discount_returns(rows, 0.5).tolist() == [0.75, 1.0, 1.5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"drawn": None}, "decision 1 recorded nothing, expected 'features'"),
        (
            {"tokens": np.zeros(5, np.float32)},
            r"'action' is float32 of shape \[5\], expected 4 numbers",
        ),
        ({"actions": np.zeros((3, 2), np.float32)}, "a chunk of 3 control steps, expected 2"),
        ({"tokens": np.array([0, np.nan, 0, 0], np.float32)}, "'action' of decision 1 holds NaN"),
        ({"rewards": np.array([np.nan, 0], np.float32)}, "'rewards' of decision 1 holds NaN"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused_with_the_decision(
    change: dict, words: str
) -> None:
    trajectory = make_trajectory()
    step = trajectory.steps[1]
    if "rewards" in change:
        step = msgspec.structs.replace(step, **change)
    else:
        step = msgspec.structs.replace(step, chunk=msgspec.structs.replace(step.chunk, **change))
    steps = (trajectory.steps[0], step, trajectory.steps[2])
    with pytest.raises(DataError, match=words):
        make_rows(msgspec.structs.replace(trajectory, steps=steps), LAYOUT)


def test_features_beyond_float16_are_refused() -> None:
    layout = msgspec.structs.replace(LAYOUT, features_dtype="float16")
    trajectory = make_trajectory()
    trajectory.steps[2].chunk.drawn["features"][0] = 70_000.0
    with pytest.raises(DataError, match=r"'features' of decision 2 .* store features as float32"):
        make_rows(trajectory, layout)
