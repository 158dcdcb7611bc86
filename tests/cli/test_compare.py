"""`vla-rl compare` holds two evaluations against each other, start by start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vla_rl.cli.compare import Pairs, count_pairs, main, paired_interval
from vla_rl.evaluation.record_file import RecordFile
from vla_rl.evaluation.records import EPISODES, EpisodeRecord

CONDITIONS = {"checkpoint": "a", "checkpoint_digest": "1", "scenes": "published", "image_size": 256}


def record(task: int, start: int, is_success: bool) -> EpisodeRecord:
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
                await file.append_record(record(task, start, is_success))
    return folder


async def test_starts_are_compared_each_against_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await evaluation(tmp_path / "a", [[True, False, False], [False] * 4])
    second = await evaluation(
        tmp_path / "b", [[False, True, True], [True] * 2], checkpoint="ws://x:1", checkpoint_digest="2",
        server={"replan": 5},
    )  # fmt: skip
    assert main([str(first), str(second)]) == 0
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
    assert main([str(first), str(second)]) == 2
    assert problem in capsys.readouterr().err


async def test_evaluations_without_a_start_in_common_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await evaluation(tmp_path / "a", [[True]])
    second = await evaluation(tmp_path / "b", [[], [True]])
    assert main([str(first), str(second)]) == 2
    assert "no start in common" in capsys.readouterr().err


def test_a_folder_that_is_no_evaluation_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "x"), str(tmp_path)]) == 2
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
            [record(0, start, bool(each)) for start, each in enumerate(side)]
            for side in (first, second)
        ]
        low, high = paired_interval(count_pairs(*outcomes))
        num_held += low <= rates[1] - rates[0] <= high
    assert num_held / 1000 > 0.93
