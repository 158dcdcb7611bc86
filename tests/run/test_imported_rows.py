"""Stored episodes become rows of a run's replay buffer, or one sentence says why they cannot."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from head_learning import BASE, make_decisions, make_head, opened_learner

from vla_rl.cli.replay import main as replay_command
from vla_rl.datasets import DatasetOptions, RecordedEpisode, open_dataset
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner.off_policy.learner import OffPolicyLearner
from vla_rl.replay import ReplayBuffer
from vla_rl.replay.config import RunReplayConfig
from vla_rl.replay.segments import list_segments
from vla_rl.run.imported_rows import RowImporter, check_source

pytest.importorskip("pyarrow")

HELD = 256
"""Decisions that the learner's buffer has before anything is imported."""


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(1) as opened:
        yield opened


def record(folder: Path, *lengths: int, task: str | None = None, **columns: dict[int, Any]) -> Path:
    """Write a data set whose episodes have these lengths; odd ones succeed."""
    from vla_rl.datasets import LeRobotWriter

    writer = LeRobotWriter(folder)
    for number, length in enumerate(lengths):
        draw = np.random.default_rng(number)
        episode: dict[str, Any] = {
            "actions": draw.uniform(-1, 1, (length, 2)).astype(np.float32),
            "rewards": np.zeros(length, np.float32),
            "about": {} if task is None else {"task": task},
            **{name: values[number] for name, values in columns.items() if number in values},
        }
        writer.add_episode(
            RecordedEpisode(
                name=f"{folder.name}/{number}",
                instruction="go",
                vectors={"state": draw.normal(size=(length, BASE.state_size)).astype(np.float32)},
                frames={},
                has_gripper=False,
                is_success=bool(number % 2),
                **episode,
            )
        )
    return folder


async def import_into(
    folder: Path,
    source: Path,
    lane: DeviceLane,
    *,
    tasks: set[str] | None = None,
    **settings: Any,
) -> tuple[int, OffPolicyLearner]:
    """Import a folder; return the number of new episodes, and the learner, whose buffer is closed again."""
    policy = make_head()
    with opened_learner(policy, lane, folder, **settings) as learner:
        number = await RowImporter(policy, learner, lane, tasks).import_rows(
            source, is_demonstration=False
        )
        assert learner.replay.buffer.num_episodes == HELD + number
    return number, learner


async def test_episodes_without_a_state_after_their_only_decision_are_counted_and_left_out(
    tmp_path: Path, lane: DeviceLane, caplog: pytest.LogCaptureFixture
) -> None:
    # 0, 2 and 4 fail; one control step is one decision of this policy
    data = record(tmp_path / "data", 1, 1, 5, 3, 1)
    number, _ = await import_into(tmp_path / "run", data, lane)
    assert number == 3
    (told,) = [each.message for each in caplog.records if "left out" in each.message]
    assert told.endswith(
        "left out episodes: 2 failed within 1 control steps, and no state after their only decision is "
        "recorded."
    )


async def test_one_line_says_how_many_rows_an_import_beyond_the_capacity_dropped(
    tmp_path: Path, lane: DeviceLane, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    # ends in a failure with 2 rows, a success with 3, and a failure with 4
    data = record(tmp_path / "data", 3, 3, 5)
    stored = RunReplayConfig(capacity=HELD + 6)
    with opened_learner(policy, lane, tmp_path / "run", stored=stored) as learner:
        number = await RowImporter(policy, learner, lane).import_rows(data, is_demonstration=False)
        kept = learner.replay.buffer.num_rows
    assert number == 3
    (told,) = [each.message for each in caplog.records if "dropped" in each.message]
    dropped = HELD + 9 - kept
    assert dropped > 0
    assert told.endswith(
        f"data: dropped {dropped} rows, the oldest files first, because the replay buffer's capacity is "
        f"{HELD + 6}; raise it (--replay.capacity) to learn from them too."
    )
    assert check_source(data, policy.layout, DatasetOptions()) == 9
    assert check_source(tmp_path / "run", policy.layout, DatasetOptions()) == HELD + 9


async def test_demonstrations_stay_whatever_the_capacity_is(
    tmp_path: Path, lane: DeviceLane, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    data = record(tmp_path / "data", 3, 3, 5)
    stored = RunReplayConfig(capacity=HELD)
    with opened_learner(policy, lane, tmp_path / "run", stored=stored) as learner:
        await RowImporter(policy, learner, lane).import_rows(data, is_demonstration=True)
        assert learner.replay.buffer.num_rows == HELD + 9
    assert not [each for each in caplog.records if "dropped" in each.message]


async def test_decisions_that_were_exported_are_no_demonstrations(
    tmp_path: Path, lane: DeviceLane
) -> None:
    source, target = tmp_path / "source", tmp_path / "exported"
    with opened_learner(make_head(), lane, source):
        pass
    assert replay_command(["export", str(source), str(target)]) == 0
    # an action of this head is as wide as one control step, so nothing else would tell
    with pytest.raises(
        DataError, match="exported was exported from a replay buffer: each of its frames is a"
    ):
        open_dataset(target)
    with pytest.raises(ConfigError, match="learn from the run's own folder"):
        await import_into(tmp_path / "run", target, lane)


async def test_episodes_of_two_sources_in_one_buffer_are_all_imported(
    tmp_path: Path, lane: DeviceLane
) -> None:
    policy = make_head()
    with opened_learner(policy, lane, tmp_path / "source") as learner:
        # with the ids of the run's own episodes
        shown = make_decisions(policy, policy.layout, 10)
        learner.replay.buffer.append(shown, is_demonstration=True, source="/data/demos")
    number, _ = await import_into(tmp_path / "run", tmp_path / "source", lane)
    assert number == HELD + 10


async def test_what_two_copies_of_one_run_did_later_is_imported_from_both(
    tmp_path: Path, lane: DeviceLane
) -> None:
    policy = make_head()
    with opened_learner(policy, lane, tmp_path / "first") as learner:
        state = learner.replay.state()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    for name, seed in (("first", 7), ("second", 8)):
        buffer = ReplayBuffer(tmp_path / name / "replay", policy.layout)
        drawn = make_decisions(policy, policy.layout, 10, first=seed)
        for number, episode in enumerate(drawn):
            episode.rows["episode"] = HELD + number
        with buffer:
            buffer.restore(state)
            buffer.append(
                [
                    msgspec.structs.replace(each, episode_id=HELD + number)
                    for number, each in enumerate(drawn)
                ]
            )
    with opened_learner(policy, lane, tmp_path / "run") as learner:
        importer = RowImporter(policy, learner, lane)
        numbers = [
            await importer.import_rows(tmp_path / name, is_demonstration=False)
            for name in ("first", "second", "first", "second")
        ]
        assert learner.replay.buffer.num_episodes == HELD + HELD + 10 + 10
    # what both did before is stored once, and nothing is stored again
    assert numbers == [HELD + 10, 10, 0, 0]


async def test_returns_that_the_critic_could_not_learn_are_refused(
    tmp_path: Path, lane: DeviceLane
) -> None:
    dense = {2: np.full(5, -1.0, np.float32)}
    data = record(tmp_path / "data", 3, 3, 5, rewards=dense)
    with pytest.raises(
        ConfigError, match=r"episode 2 of .*data has a return of -3.9\d+, expected 0 to 1"
    ):
        await import_into(tmp_path / "a", data, lane)
    for settings in ({"return_range": (-5.0, 1.0)}, {"return_range": None}, {"algorithm": "awr"}):
        number, _ = await import_into(
            tmp_path / f"b{len(settings)}{settings}", data, lane, **settings
        )
        assert number == 3


async def test_episodes_of_tasks_that_the_run_does_not_have_are_left_out(
    tmp_path: Path, lane: DeviceLane, caplog: pytest.LogCaptureFixture
) -> None:
    with opened_learner(make_head(), lane, tmp_path / "source"):
        pass
    number, _ = await import_into(tmp_path / "a", tmp_path / "source", lane, tasks={"other"})
    assert number == 0
    assert "256 are of bandit, which is no task of this run" in caplog.text
    number, _ = await import_into(tmp_path / "b", tmp_path / "source", lane, tasks={"bandit"})
    assert number == HELD
    named = record(tmp_path / "named", 3, 3, task="reach")
    assert (await import_into(tmp_path / "c", named, lane, tasks={"bandit"}))[0] == 0
    # other data sets know a task by its words alone
    unnamed = record(tmp_path / "unnamed", 3, 3)
    assert (await import_into(tmp_path / "d", unnamed, lane, tasks={"bandit"}))[0] == 2


async def test_successes_that_earned_nothing_are_counted_in_one_line(
    tmp_path: Path, lane: DeviceLane, caplog: pytest.LogCaptureFixture
) -> None:
    # 1 and 3 succeed, and 1 is rewarded
    data = record(tmp_path / "data", 3, 3, 3, 3, rewards={1: np.array([0, 0, 1], np.float32)})
    await import_into(tmp_path / "run", data, lane)
    assert "data: 1 of 4 episodes count as successes, and all their rewards are 0" in caplog.text


async def test_damaged_files_of_a_source_are_named_or_left_out(
    tmp_path: Path, lane: DeviceLane, caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_head()
    with opened_learner(policy, lane, tmp_path / "source") as learner:
        learner.replay.buffer.append(make_decisions(policy, policy.layout, 10, first=900))
    newest = list_segments(tmp_path / "source" / "replay")[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{newest} has .* \(--replay.damaged drop\)"):
        await import_into(tmp_path / "a", tmp_path / "source", lane)
    number, _ = await import_into(
        tmp_path / "b", tmp_path / "source", lane, stored=RunReplayConfig(damaged="drop")
    )
    assert HELD <= number < HELD + 10
    assert f"{newest} has" in caplog.text


async def test_a_data_set_without_actions_or_with_numbers_that_are_not_finite_says_so(
    tmp_path: Path, lane: DeviceLane
) -> None:
    data = record(tmp_path / "data", 3, 3)
    info = data / "meta" / "info.json"
    info.write_text(info.read_text().replace('"action"', '"motion"'))
    with pytest.raises(
        ConfigError, match=r"cannot be read as a data set: .* no feature that is known as 'action'"
    ):
        await import_into(tmp_path / "run", data, lane)


async def test_what_a_data_set_does_not_record_is_an_option(
    tmp_path: Path, lane: DeviceLane
) -> None:
    open_or_closed = {number: np.full((3, 2), 0.5, np.float32) for number in range(2)}
    data = record(tmp_path / "data", 3, 3, actions=open_or_closed)
    with pytest.raises(ConfigError, match=r"gripper commands .* in \[0, 1\], expected -1"):
        await import_into(tmp_path / "a", data, lane)
    options = RunReplayConfig(data=DatasetOptions(gripper="none"))
    assert (await import_into(tmp_path / "b", data, lane, stored=options))[0] == 2
