"""What people read of finished runs: a run's page, two evaluations start by start.

The page says what is missing.
"""

import importlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import msgspec
import numpy as np
import pytest
from toy_runs import evaluated, write_records

from vla_rl.cli import compare, report
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.compare import Pairs, count_pairs, paired_interval
from vla_rl.cli.report import comparisons, running_minutes, write_report
from vla_rl.cli.report_charts import list_tasks, node_seconds, success_chart, value_chart
from vla_rl.evaluation.contact_sheets import contact_sheet_path
from vla_rl.evaluation.held_out_curve import curve_points, make_curve, write_curve
from vla_rl.evaluation.record_file import RecordFile
from vla_rl.evaluation.records import EPISODES, SUCCESSES, EpisodeRecord
from vla_rl.evaluation.validation import validation_path
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config

CONDITIONS = {"checkpoint": "a", "checkpoint_digest": "1", "scenes": "published", "image_size": 256}


def held_out_record(version: int, task_id: int, start: int, is_success: bool) -> EpisodeRecord:
    task = f"libero_object/{task_id}"
    words = "pick up the <cream> cheese"
    return evaluated(task, start, is_success, weights=version, instruction=words)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "report", Config())


def test_before_and_after_are_compared_by_task_and_in_all() -> None:
    results = [
        held_out_record(0, 1, 40, False),
        held_out_record(0, 1, 41, False),
        held_out_record(0, 2, 40, True),
        held_out_record(0, 2, 41, True),
    ]
    results += [
        held_out_record(9, 1, 40, True),
        held_out_record(9, 1, 41, False),
        held_out_record(9, 2, 40, True),
        held_out_record(9, 2, 41, True),
    ]
    rows = comparisons(results)
    assert [(row.name, row.gain) for row in rows] == [
        ("libero_object/1", "+50 points"),
        ("libero_object/2", "+0 points"),
        ("all", "+25 points"),
    ]
    assert rows[2].before.startswith("2 of 4: 50 %")
    assert rows[2].after.startswith("3 of 4: 75 %")


def test_where_evaluation_was_stopped_the_episodes_of_both_are_compared_and_the_rest_is_counted(
    run: RunDirectory,
) -> None:
    before = [
        held_out_record(0, 1, 40, True),
        held_out_record(0, 1, 41, False),
        held_out_record(0, 2, 40, False),
    ]
    results = [*before, held_out_record(9, 1, 41, True)]
    assert [(row.name, row.before[:6], row.gain) for row in comparisons(results)] == [
        ("libero_object/1", "0 of 1", "+100 points"),
        ("all", "0 of 1", "+100 points"),
    ]
    write_records(run.path / SUCCESSES.file, results)
    assert "2 more episodes of the first weights are left out" in write_report(run).read_text()


def test_the_minutes_of_a_run_leave_out_the_pause_before_a_resume() -> None:
    times = [(0.0, 90.0), (60.0, 100.0), (100_000.0, 120.0)]
    rows = [
        {"wall_time_s": wall_time_s, "time/update_s": update_s} for wall_time_s, update_s in times
    ]
    assert running_minutes(rows) == 3.0
    assert running_minutes(rows[:1]) == 0.0


def test_contact_sheets_of_the_same_start_in_two_scenes_are_two_files(run: RunDirectory) -> None:
    assert contact_sheet_path(run, 3, ("libero_goal/7", 40, 0, 0)) != contact_sheet_path(
        run, 3, ("libero_goal/7", 40, 1, 0)
    )


def test_weights_that_were_evaluated_alone_are_compared_with_nothing() -> None:
    assert comparisons([held_out_record(0, 1, 40, False)]) == []


def test_each_task_has_a_curve_where_there_are_several() -> None:
    rates = {"rollout/success_rate": 0.5, "rollout/success_rate/libero_object/6": 1.0}
    rows = [
        {"update": 1.0, **rates, "rollout/success_rate/libero_object/1": 0.0},
        {"update": 2.0, **rates},
    ]
    assert list_tasks(rows, "rollout/success_rate") == ["libero_object/1", "libero_object/6"]
    chart = success_chart(rows, [])
    assert chart is not None
    assert "libero_object/1" in chart
    assert "libero_object/6" in chart


def test_values_of_an_off_policy_critic_are_drawn_beside_measured_returns() -> None:
    values = {"critic/new_value_mean": 0.9, "critic/new_return_mean": 0.5, "critic/q_mean": 0.8}
    chart = value_chart([{"update": 1.0, "rollout/mean_return": 0.5}, {"update": 2.0, **values}])
    assert chart is not None
    assert "measured return" in chart
    assert value_chart([{"update": 1.0, "rollout/mean_return": 0.5}]) is None


def test_the_page_of_a_run_whose_success_is_unknown_shows_returns_instead(
    run: RunDirectory,
) -> None:
    rows = [
        {"update": update, "wall_time_s": 60.0 * update, "rollout/mean_return": 0.5 * update}
        for update in (1, 2)
    ]
    run.metrics.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    page = write_report(run).read_text()
    assert "<h2>Success</h2>" not in page
    assert "<h2>Return</h2>" in page
    assert "No episode of this run had <code>is_success</code> in its info" in page


def test_the_page_shows_a_start_that_failed_before_and_was_solved_after(run: RunDirectory) -> None:
    records = [
        held_out_record(0, 1, 40, False),
        held_out_record(0, 1, 41, False),
        held_out_record(3, 1, 40, True),
        held_out_record(3, 1, 41, False),
    ]
    write_records(run.path / SUCCESSES.file, records)
    (run.path / "strips").mkdir()
    for record in records:
        path = contact_sheet_path(run, record.weights, record.episode_key)
        imageio.imwrite(path, np.zeros((8, 8, 3), np.uint8))
    page = write_report(run).read_text()
    assert page.count("data:image/jpeg;base64,") == 2
    assert (
        "pick up the &lt;cream&gt; cheese (libero_object/1, initial state 40, scene seed 0)" in page
    )


def test_the_curve_has_a_point_for_each_weights_that_ran_all_starts_and_none_for_others(
    run: RunDirectory,
) -> None:
    records = [
        held_out_record(version, task, 40 + start, (version, task, start) != (0, 1, 0))
        for version in (0, 4)
        for task in (1, 2)
        for start in (0, 1)
    ]
    # the first episode to end; the others still run
    records.append(held_out_record(8, 1, 40, True))
    write_records(run.path / SUCCESSES.file, records)
    keys = [record.episode_key for record in records if record.weights == 0]
    points = curve_points(records, keys, "success_rate")
    # what chose differs from what is reported, and the report comes first
    chose = [points[1], msgspec.structs.replace(points[0], weights=6)]
    write_curve(run, make_curve("success_rate", chose, points, skipped=[2]))
    page = write_report(run).read_text()
    assert page.index("<h2>Report: starts that chose nothing</h2>") < page.index(
        "<h2>Chose: starts that chose the best checkpoint</h2>"
    )
    assert "<h2>Held-out starts: report and choice</h2>" in page
    assert "chose, 95 %" in page
    assert "report, 95 %" in page
    assert "<td>4 (best)</td><td>4 of 4 starts solved = 100 % (95 %: 51 to 100)</td>" in page
    assert "<td>0</td><td>3 of 4 starts solved = 75 % (95 %: 30 to 95)</td>" in page
    assert "<td>8</td>" not in page
    assert "<td>6</td><td>3 of 4 starts solved = 75 % (95 %: 30 to 95)</td>" in page
    assert "an earlier evaluation still ran: 2." in page


def test_the_best_weights_stand_beside_the_first_and_the_last(run: RunDirectory) -> None:
    records = [
        held_out_record(version, 1, start, start < version)
        for version in (0, 2, 4)
        for start in range(4)
    ]
    write_records(run.path / SUCCESSES.file, records)
    points = curve_points(records, [record.episode_key for record in records[:4]], "success_rate")
    write_curve(run, make_curve("success_rate", [points[1]], points))
    page = write_report(run).read_text()
    assert "<th>best checkpoint, weights 2</th>" in page
    assert "<td>2 of 4: 50 % (95 %: 15 to 85)</td><td>4 of 4: 100 %" in page


def test_a_run_without_updates_or_held_out_episodes_says_so(run: RunDirectory) -> None:
    page = write_report(run).read_text()
    assert "0 updates" in page
    assert "This run did not evaluate before and after" in page


@pytest.mark.parametrize("recipe", ["srpo_libero", "grpo_text", "train_toy", "srpo_toy"])
def test_the_page_names_only_options_that_the_recipe_has(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"vla_rl.recipes.{recipe}")
    (config_type,) = {
        kind
        for name, kind in vars(module).items()
        if name.lower() == f"{recipe.replace('_', '')}config"
    }
    page = write_report(RunDirectory.create(tmp_path, recipe, config_type())).read_text()
    options = set(re.findall(r"<code>(--[\w.-]+)", page))
    assert options == {
        "srpo_libero": {"--held-out.init-states"},
        "srpo_toy": {"--held-out.init-states"},
        "train_toy": {"--held-out.starts"},
        "grpo_text": {"--num-validation"},
    }.get(recipe, set())
    with pytest.raises(SystemExit):
        parse_command(TrainingLaunch, config_type, "", ["--help"])
    assert all(option in capsys.readouterr().out for option in options)


def test_the_page_compares_what_validation_found_before_and_after(run: RunDirectory) -> None:
    solved = {0: 1, 2: 2, 4: 3}
    tries = [
        evaluated(start=n, weights=weights, value=float(n < num), parts={"success": float(n < num)})
        for weights, num in solved.items()
        for n in range(4)
    ]
    write_records(validation_path(run), tries)
    page = write_report(run).read_text()
    assert "<td>mean</td><td>0.250</td><td>0.750</td>" in page
    assert "did not evaluate" not in page


def test_where_the_time_went_is_added_up_by_node() -> None:
    rows = [
        {"update": 1.0, "time/node/rollout_s": 2.0, "time/node/update_s": 1.5},
        {"update": 2.0, "time/node/update_s": 1.5},
    ]
    assert node_seconds(rows) == {"update": 3.0, "rollout": 2.0}


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    assert report.main() == 2
    assert "expected the folder of an earlier run" in capsys.readouterr().err


def compared_record(task: int, start: int, is_success: bool) -> EpisodeRecord:
    return EpisodeRecord(
        task=f"libero_goal/{task}", start=start, seed=0, weights=0, member=0, value=float(is_success),
        parts={"steps": 80.0, "attempts": 1.0}, instruction="open it",
    )  # fmt: skip


def _write_conditions(folder: Path, conditions: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "conditions.json").write_bytes(msgspec.json.encode(conditions))


async def evaluation(folder: Path, solved: Sequence[Sequence[bool]], **changed: Any) -> Path:
    """The folder of an evaluation with these outcomes, by task and start."""
    _write_conditions(folder, CONDITIONS | changed)
    with RecordFile(folder / EPISODES.file, EPISODES.measure, each_once=True) as file:
        for task, outcomes in enumerate(solved):
            for start, is_success in enumerate(outcomes):
                await file.append_record(compared_record(task, start, is_success))
    return folder


async def test_starts_are_compared_each_against_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await evaluation(tmp_path / "a", [[True, False, False], [False] * 4])
    second = await evaluation(
        tmp_path / "b", [[False, True, True], [True] * 2], checkpoint="ws://x:1", checkpoint_digest="2",
        server={"replan": 5},
    )  # fmt: skip
    assert compare.main([str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert f"second: {second}, ws://x:1" in printed
    assert f"2 of 7 episodes of {first} have no counterpart" in printed
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in printed.splitlines()
        if "│" in line
    ]
    by_task = {cells[0]: cells for cells in rows}
    assert by_task["libero_goal/0"][3:5] == ["1", "2"]
    assert by_task["libero_goal/1"][3:5] == ["0", "2"]
    assert by_task["all"][1] == "1/5"
    assert by_task["all"][2] == "4/5"
    assert by_task["all"][5].startswith("+60.0 (")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"scenes": "same"}, "scenes is 'published' and 'same'"),
        ({"image_size": 84}, "image_size is 256 and 84"),
        ({"physics": "fast"}, "physics is None and 'fast'"),
    ],
)
async def test_other_settings_are_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await evaluation(tmp_path / "a", [[True]])
    second = await evaluation(tmp_path / "b", [[True]], **changed)
    assert compare.main([str(first), str(second)]) == 2
    assert problem in capsys.readouterr().err


async def test_evaluations_without_a_start_in_common_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await evaluation(tmp_path / "a", [[True]])
    second = await evaluation(tmp_path / "b", [[], [True]])
    assert compare.main([str(first), str(second)]) == 2
    assert "no start in common" in capsys.readouterr().err


def test_a_folder_that_is_no_evaluation_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([str(tmp_path / "x"), str(tmp_path)]) == 2
    assert "is no folder of an evaluation: conditions.json" in capsys.readouterr().err


def test_the_interval_changes_its_sign_with_the_order() -> None:
    low, high = paired_interval(Pairs(both=30, first=4, second=12, neither=4))
    assert paired_interval(Pairs(both=30, first=12, second=4, neither=4)) == pytest.approx(
        (-high, -low)
    )
    assert low < 8 / 50 < high


def test_the_interval_has_a_width_where_one_side_solves_all() -> None:
    low, high = paired_interval(Pairs(both=8, first=0, second=2, neither=0))
    assert low < 0.2 < high
    low, high = paired_interval(Pairs(both=10, first=0, second=0, neither=0))
    assert low < -0.1
    assert high > 0.1


@pytest.mark.parametrize("rates", [(0.5, 0.7), (0.9, 0.97), (0.05, 0.05)])
def test_nineteen_of_twenty_intervals_hold_the_true_difference(rates: tuple[float, float]) -> None:
    draws = np.random.default_rng(0)
    num_held = 0
    for _ in range(1000):
        luck = draws.random(40)  # a hard start is hard for both
        own = draws.random((2, 40))
        mixed = np.where(draws.random((2, 40)) < 0.5, luck, own)
        first, second = mixed[0] < rates[0], mixed[1] < rates[1]
        outcomes = [
            [compared_record(0, start, bool(each)) for start, each in enumerate(side)]
            for side in (first, second)
        ]
        low, high = paired_interval(count_pairs(*outcomes))
        num_held += low <= rates[1] - rates[0] <= high
    assert num_held / 1000 > 0.93
