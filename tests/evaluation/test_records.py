"""Records of episodes: what they hold, their file, files of 24320b8d, the means that are made of them."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from disks import SmallDisk
from small_episodes import trajectory
from toy_runs import as_lines, evaluated, scored, write_records

from vla_rl.errors import ConfigError
from vla_rl.evaluation.record_file import RecordFile, read_records, set_later_aside
from vla_rl.evaluation.records import (
    Measure,
    episode_key,
    group_by_task,
    group_by_weights,
    make_record,
    record_key,
)
from vla_rl.evaluation.validation import (
    mean_best_reward,
    mean_majority_reward,
    read_validation,
    validation_metrics,
)
from vla_rl.types import EnvSpec, EpisodeSpec, StopReason, Trajectory


def episode(number: int, env: EnvSpec | None = None) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=number,
        group_id=7,
        member=number,
        env=env or EnvSpec(id="none"),
        task="libero_goal/7",
        seed=number,
        policy_seed=0,
    )


def ended(of: EpisodeSpec, info: dict[str, Any] | None = None) -> Trajectory:
    return msgspec.structs.replace(
        trajectory([[0.0, 0.0]] * 5 + [[0.0], [1.0]], stop=StopReason.SUCCESS),
        episode=of,
        final_observation={"instruction": "turn on the stove"},
        info=info or {},
    )


@pytest.mark.parametrize(
    ("measure", "env", "info"),
    [
        ("success_rate", EnvSpec(id="none", kwargs={"scene_seed": 3}), {"scene_seed": 3}),
        ("score", EnvSpec(id="none"), {"score": {"total": 0.5, "comfort": 1.0}}),
        ("reward", EnvSpec(id="none"), {"last_reply": "4"}),
    ],
)
def test_a_record_has_the_key_of_its_episode(
    measure: Measure, env: EnvSpec, info: dict[str, Any]
) -> None:
    of = episode(5, env)
    record = make_record(ended(of, info), measure, weights=20)
    assert record_key(record, measure) == episode_key(of, measure)
    assert (record.task, record.weights) == ("libero_goal/7", 20)


def test_a_success_has_its_steps_and_a_score_its_parts() -> None:
    success = make_record(ended(episode(5)))
    assert (success.value, success.num_steps, success.parts["attempts"]) == (1.0, 12, 1.0)
    assert (success.suite, success.task_id) == ("libero_goal", 7)
    drive = make_record(ended(episode(5), {"score": {"total": 0.5, "comfort": 1.0}}), "score")
    assert (drive.value, drive.parts) == (0.5, {"comfort": 1.0})
    with pytest.raises(ConfigError, match="without info\\['score'\\]"):
        make_record(ended(episode(5)), "score")


def test_equal_answers_have_equal_digests() -> None:
    answers = [
        make_record(ended(episode(member), {"last_reply": reply}), "reward").answer
        for member, reply in enumerate(("4", "four", "4"))
    ]
    assert answers[0] == answers[2] != answers[1]


def test_tasks_are_in_order_of_their_number_and_weights_of_their_version() -> None:
    records = [evaluated("goal/10", 0), evaluated("goal/2", 0, weights=4), evaluated("goal/2", 1)]
    assert list(group_by_task(records)) == ["goal/2", "goal/10"]
    assert list(group_by_weights(reversed(records))) == [0, 4]


async def test_records_are_on_disk_as_they_come_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with RecordFile(path) as file:
        await file.append_record(evaluated(start=0))
        await file.append_record(evaluated(start=1, is_success=False))
        assert len(path.read_bytes().splitlines()) == 2
    path.write_bytes(path.read_bytes() + b'{"task": "libero_go')  # killed while it wrote
    with RecordFile(path) as file:
        assert file.records == [evaluated(start=0), evaluated(start=1, is_success=False)]
        await file.append_record(evaluated(start=2))
    assert len(read_records(path)) == 3


async def test_records_that_find_no_room_are_kept_and_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "episodes.jsonl", SmallDisk(monkeypatch)
    with RecordFile(path) as file:
        await file.append_record(evaluated(start=0))
        disk.room = 50  # of a line of 150 bytes
        await file.append_record(evaluated(start=1))
        await file.append_record(evaluated(start=2))
        assert len(path.read_bytes().splitlines()) == 1
        assert (len(file.records), file.num_waiting) == (3, 2)
        disk.room = None
        assert file.num_waiting == 0
    assert [record.start for record in read_records(path)] == [0, 1, 2]
    assert caplog.text.count("No space left on device") == 1


async def test_an_episode_may_have_to_stand_in_a_file_once(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "episodes.jsonl", each_once=True) as file:
        await file.append_record(evaluated())
        with pytest.raises(ConfigError, match="twice, expected every episode once"):
            await file.append_record(evaluated(is_success=False))
        await file.append_record(evaluated(weights=2))


async def test_what_is_missing_is_by_weights(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "held_out.jsonl")
    await file.append_record(evaluated(start=0, weights=4))
    episodes = [episode(0), episode(1)]
    assert file.list_missing(episodes, weights=4) == [episodes[1]]
    assert file.list_missing(episodes, weights=5) == episodes


@pytest.mark.parametrize("line", ['{"suite": 3}', "4 one 1", '{"weights": 4, "total": 1}', "[]"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_bytes(as_lines([evaluated()]) + f"{line}\n".encode())
    with pytest.raises(
        ConfigError, match=r"episodes\.jsonl, line 2 is not a result: .* remove that line"
    ):
        read_records(path)


def test_records_of_later_weights_are_set_aside_and_a_damaged_line_stays(tmp_path: Path) -> None:
    path = tmp_path / "held_out.jsonl"
    kept, later = as_lines([evaluated(weights=4)]), as_lines([evaluated(weights=6)])
    old = b'{"weight_version": %d, "result": {}}\n'
    path.write_bytes(kept + later + b"five\n" + old % 5 + old % 6)
    set_later_aside(path, last=5)
    assert path.read_bytes() == kept + b"five\n" + old % 5
    assert (tmp_path / "held_out-undone.jsonl").read_bytes() == later + old % 6


OLD_RESULT = (
    '{"suite":"libero_goal","task_id":7,"task":"libero_goal/7","instruction":"turn on the stove",'
    '"init_state_id":40,"scene_seed":3,"is_success":true,"num_steps":87,"attempts":1,'
    '"perturbation":"swap"}'
)
AS_RECORD = evaluated(start=40, seed=3, parts={"steps": 87.0, "attempts": 1.0}, perturbation="swap")


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (OLD_RESULT, AS_RECORD),
        (
            f'{{"weight_version": 20, "result": {OLD_RESULT}}}',
            msgspec.structs.replace(AS_RECORD, weights=20),
        ),
        (
            '{"weights": 4, "start": 2, "total": 0.5, "comfort": 1.0}',
            msgspec.structs.replace(scored(4, 2, 0.5, comfort=1.0), task=""),
        ),
    ],
    ids=["episodes.jsonl", "held_out.jsonl", "held_out_scores.jsonl"],
)
async def test_lines_of_24320b8d_are_read_and_new_ones_go_below_them(
    tmp_path: Path, line: str, record: Any
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f"{line}\n")
    with RecordFile(path) as file:
        await file.append_record(evaluated(start=50))
    assert read_records(path) == [record, evaluated(start=50)]
    assert path.read_text().startswith(line)


def tries(weights: int, *rewards: float) -> list[Any]:
    return [
        evaluated(
            start=0,
            weights=weights,
            member=member,
            value=reward,
            parts={"success": reward},
            answer="a",
        )
        for member, reward in enumerate(rewards)
    ]


def test_validations_of_24320b8d_stand_beside_those_of_now(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    write_records(path, tries(2, 1.0, 0.0))
    before = b'{"weight_version": 0, "num_problems": 1, "metrics": {"mean": 0.25}}\n'
    path.write_bytes(before + path.read_bytes())
    found = read_validation(path)
    assert found[0] == {"mean": 0.25}
    assert (found[2]["mean"], found[2]["best@2"], found[2]["success"]) == (0.5, 1.0, 0.5)
    assert RecordFile(path, "reward").list_missing([episode(0)], weights=0) == []


def test_a_validation_that_was_stopped_has_no_metrics(tmp_path: Path) -> None:
    path = tmp_path / "validation.jsonl"
    write_records(path, [*tries(0, 1.0, 0.0), *tries(2, 1.0)])
    assert list(read_validation(path)) == [0]
    assert np.isclose(read_validation(path)[0]["mean"], 0.5)


def test_best_of_all_is_the_maximum_and_best_of_one_the_mean() -> None:
    rewards = np.array([[0.0, 1.0, 0.5], [0.0, 0.0, 0.3]])
    assert mean_best_reward(rewards, 3) == pytest.approx((1.0 + 0.3) / 2)
    assert mean_best_reward(rewards, 1) == pytest.approx(rewards.mean())


def test_best_of_some_is_the_mean_over_all_ways_to_draw_them() -> None:
    rewards = np.random.default_rng(0).random((5, 6))
    for num in range(1, 7):
        drawn = [
            max(row[list(indices)])
            for row in rewards
            for indices in itertools.combinations(range(6), num)
        ]
        assert mean_best_reward(rewards, num) == pytest.approx(np.mean(drawn))


def test_the_majority_answers_and_of_equals_the_first() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    assert mean_majority_reward(
        rewards, [["7", "8", "9", "7"], ["1", "2", "2", "1"]]
    ) == pytest.approx((1.0 + 0.0) / 2)


def test_the_figures_have_names_with_their_numbers() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    metrics = validation_metrics(rewards, [["4", "5", "5", "5", "6", "6"]])
    assert metrics == pytest.approx(
        {"mean": 1 / 6, "best@2": 1 / 3, "best@4": 2 / 3, "best@6": 1.0, "maj@6": 0.0}
    )
    assert validation_metrics(np.array([[1.0]])) == {"mean": 1.0}


def test_nothing_to_validate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards are \[0, 4\], expected \[problems, tries\]"):
        validation_metrics(np.zeros((0, 4)))
    with pytest.raises(ValueError, match=r"best@5 of 4 tries, expected 1 to 4"):
        mean_best_reward(np.zeros((1, 4)), 5)
