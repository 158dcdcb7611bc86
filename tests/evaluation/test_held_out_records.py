"""Results of held-out episodes: on disk line by line, from another run, as a curve with intervals."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out import ScoreEvaluator, conditions_path
from vla_rl.evaluation.held_out_curve import (
    choose,
    curve_path,
    curve_points,
    make_curve,
    read_curve,
    write_curve,
)
from vla_rl.evaluation.held_out_records import (
    SCORES,
    SUCCESSES,
    HeldOutRecords,
    HeldOutRow,
    RowFormat,
    set_aside_rows,
)
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config, EnvSpec, EpisodeSpec, Sampling


def row_in(line: bytes) -> HeldOutRow:
    version, number, value = line.split()
    return HeldOutRow(int(version), ("toy", int(number), 0), float(value))


def no_line(version: int, trajectory: Any) -> bytes:
    raise AssertionError("no trajectory is written here")


NUMBERS = RowFormat(
    file="numbers",
    measure="score",
    line_of=no_line,
    row_in=row_in,
    key_of=lambda episode: ("toy", episode.episode_id, 0),
    table_of=lambda lines: Text(""),
)


def episode(number: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=0,
        env=EnvSpec(id="none"),
        task="toy",
        seed=0,
        policy_seed=0,
    )


async def test_a_line_is_on_disk_when_it_was_added(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    book = HeldOutRecords(file, NUMBERS)
    await book.add(b"4 0 0.5")
    await book.add(b"4 1 1\n")
    assert file.read_bytes() == b"4 0 0.5\n4 1 1\n"
    again = HeldOutRecords(file, NUMBERS)
    assert again.rows == book.rows
    assert again.lines == [b"4 0 0.5", b"4 1 1"]


async def test_what_is_missing_is_by_version(tmp_path: Path) -> None:
    book = HeldOutRecords(tmp_path / "numbers", NUMBERS)
    await book.add(b"4 0 1")
    episodes = [episode(0), episode(1)]
    assert book.missing(4, episodes) == [episodes[1]]
    assert book.missing(5, episodes) == episodes


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"4 0 1\n4 1")
    assert len(HeldOutRecords(file, NUMBERS).rows) == 1
    file.write_bytes(b"4 0 1\n4 one 1\n")
    with pytest.raises(ConfigError, match=r"numbers, line 2 is not a result: .* remove that line"):
        HeldOutRecords(file, NUMBERS)


def test_lines_of_later_weights_are_set_aside_and_a_damaged_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_bytes(b"4 0 1\n6 0 1\nfive\n5 0 1\n")
    set_aside_rows(file, NUMBERS, last=5)
    assert file.read_bytes() == b"4 0 1\nfive\n5 0 1\n"
    assert (tmp_path / "numbers-undone").read_bytes() == b"6 0 1\n"


def driving_episodes(num: int = 3, version: str = "epdms_v2") -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=EnvSpec(id="vla_rl/driving-v0", kwargs={"version": version}),
            task="driving",
            options={"init_state_id": number},
            sampling=Sampling(greedy=True),
            seed=0,
            policy_seed=0,
        )
        for number in range(num)
    ]


def score_line(weights: int, start: int) -> bytes:
    return json.dumps({"weights": weights, "start": start, "total": start / 10}).encode()


@pytest.fixture
def other_run(tmp_path: Path) -> RunDirectory:
    """A run of policy p whose weights 0 and 4 have run three starts."""
    run = RunDirectory.create(tmp_path, "other", Config(), {"policy_digest": "p"})
    lines = [score_line(weights, start) for weights in (0, 4) for start in (2, 0, 1)]
    (run.path / SCORES.file).write_bytes(b"".join(each + b"\n" for each in lines))
    conditions_path(run).write_text(json.dumps(ScoreEvaluator(driving_episodes()).conditions))
    return run


def evaluator_with_first_results(
    other_run: RunDirectory, wanted: list[EpisodeSpec] | None = None, policy: str = "p"
) -> ScoreEvaluator:
    schedule = HeldOutSchedule(first_results_of=str(other_run.path))
    return ScoreEvaluator(wanted or driving_episodes(), schedule, policy_digest=policy)


def test_a_run_begins_with_the_first_results_of_another(
    other_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    book = evaluator_with_first_results(other_run).open(run)
    assert not book.missing(0, driving_episodes())
    assert len(book.missing(4, driving_episodes())) == 3
    assert book.lines == [score_line(0, start) for start in range(3)]
    assert (
        capsys.readouterr().out
        == f"the 3 held-out results of the first weights in {SCORES.file} are those of {other_run.path}\n"
    )


def test_a_resumed_run_keeps_its_own_results(other_run: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    (run.path / SCORES.file).write_bytes(score_line(0, 1) + b"\n")
    book = evaluator_with_first_results(other_run).open(run)
    assert book.lines == [score_line(0, 1)]


@pytest.mark.parametrize(
    ("policy", "wanted", "words"),
    [
        ("q", driving_episodes(), "started from the policy with the digest p, expected q"),
        ("", driving_episodes(), "this recipe makes its policy anew in each run"),
        ("p", driving_episodes(version="pdms_v1"), "version is 'pdms_v1' now"),
        ("p", driving_episodes(5), "lacks 2 of 5 held-out episodes of the first weights"),
    ],
    ids=["another policy", "a policy made anew", "other conditions", "other starts"],
)
def test_a_run_that_does_not_fit_is_refused_before_anything_starts(
    other_run: RunDirectory, policy: str, wanted: list[EpisodeSpec], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluator_with_first_results(other_run, wanted, policy)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        evaluator_with_first_results(RunDirectory(tmp_path))


def test_results_without_their_conditions_are_refused(other_run: RunDirectory) -> None:
    conditions_path(other_run).unlink()
    with pytest.raises(ConfigError, match="expected the conditions of the results beside it"):
        evaluator_with_first_results(other_run)


KEYS = [("toy/0", start, 0) for start in range(4)]


def success_rows(version: int, *values: float) -> list[HeldOutRow]:
    return [HeldOutRow(version, key, value) for key, value in zip(KEYS, values, strict=False)]


def test_scores_have_the_mean_and_the_normal_interval_of_their_total() -> None:
    lines = [
        json.dumps({"weights": 4, "start": start, "total": total, "comfort": 1.0}).encode()
        for start, total in enumerate((0.0, 0.5, 0.5, 1.0))
    ]
    found = [SCORES.row_in(line) for line in lines]
    (point,) = curve_points(found, [row.key for row in found], SCORES)
    curve = make_curve("score", [point])
    # deviation sqrt(1/6) = .408, over sqrt(4), times 1.96
    assert (point.all.mean, point.all.high - 0.5) == (0.5, pytest.approx(0.400, abs=1e-3))
    assert curve.describe(point.all) == "score 0.500 ± 0.400 over 4 starts"
    assert curve.metrics_of(point)["held_out/score"] == 0.5
    with pytest.raises(ValueError, match="expected weights, start and total"):
        SCORES.row_in(b'{"weights": 4}')


def test_the_earliest_of_equals_is_the_best() -> None:
    found = [
        *success_rows(0, 1, 0, 0, 0),
        *success_rows(2, 1, 1, 0, 0),
        *success_rows(4, 0, 0, 1, 1),
        *success_rows(6, 1, 0, 0, 0),
    ]
    best = choose(curve_points(found, KEYS, SUCCESSES))
    assert best is not None
    assert best.weights == 2


def test_the_best_has_its_report_first_and_what_chose_it_beside_it() -> None:
    chose = curve_points(
        [*success_rows(0, 1, 0, 0, 0), *success_rows(4, 1, 1, 1, 1)], KEYS, SUCCESSES
    )
    report = curve_points(
        [*success_rows(0, 0, 0, 0, 0), *success_rows(4, 1, 1, 0, 0)], KEYS, SUCCESSES
    )
    best = make_curve("success_rate", chose, report).best
    assert best is not None
    assert best.report is not None
    assert (best.weights, best.report.mean, best.chose.mean) == (4, 0.5, 1.0)
    unreported = make_curve("success_rate", chose, report[:1]).best
    assert unreported is not None
    assert unreported.report is None


def test_only_the_first_weights_the_best_and_the_newest_are_reported() -> None:
    every = [
        row for version in (0, 2, 4, 6) for row in success_rows(version, 1, 0, 0, version == 4)
    ]
    points = curve_points(every, KEYS, SUCCESSES)
    curve = make_curve("success_rate", points, points)
    assert [point.weights for point in curve.report] == [0, 4, 6]


def test_episodes_that_are_not_held_out_any_more_do_not_count() -> None:
    found = success_rows(0, 1, 1, 0, 0)
    (point,) = curve_points(found, KEYS[:2], SUCCESSES)
    assert (point.all.episodes, point.all.mean) == (2, 1.0)
    assert curve_points(found, [*KEYS, ("toy/0", 9, 0)], SUCCESSES) == ()
    assert choose(curve_points([], [], SUCCESSES)) is None


def test_a_curve_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "curve", Config())
    assert read_curve(run) is None
    points = curve_points(success_rows(0, 1, 1, 0, 0), KEYS, SUCCESSES)
    curve = make_curve("success_rate", points, points, skipped=[2])
    write_curve(run, curve)
    assert read_curve(run) == curve
    curve_path(run).write_text("{")
    with pytest.raises(ConfigError, match=r"held_out_curve.json cannot be read.*remove it"):
        read_curve(run)
