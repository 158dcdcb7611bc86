"""Check the results file, its counts and the intervals of its rates."""

from pathlib import Path

import pytest
from disks import SmallDisk

from vla_rl.errors import ConfigError
from vla_rl.evaluation import (
    EpisodeResult,
    ResultFile,
    wilson_interval,
)
from vla_rl.evaluation.results import by_task, summary_of


@pytest.mark.parametrize(
    ("num_successes", "num", "low", "high"),
    # worked out by hand for 0 of 1, where centre and half are both z^2/2 / (1 + z^2); the others
    # from Wilson's equation solved as a quadratic: (p - x)^2 = z^2 x (1 - x) / n
    [
        (0, 1, 0.0, 0.793450),
        (8, 10, 0.490163, 0.943318),
        (485, 500, 0.951096, 0.981737),
        (10, 10, 0.722467, 1.0),
    ],
)
def test_wilson_s_interval(num_successes: int, num: int, low: float, high: float) -> None:
    found = wilson_interval(num_successes, num)
    assert found == pytest.approx((low, high), abs=2e-6)
    z, rate = 1.959963984540054, num_successes / num
    for end in found:
        if 0 < end < 1:
            assert (rate - end) ** 2 == pytest.approx(z * z * end * (1 - end) / num, abs=1e-9)


def test_an_interval_of_no_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="0 of 0 episodes"):
        wilson_interval(0, 0)


def result(
    task_id: int, init_state_id: int, is_success: bool = True, num_steps: int = 100
) -> EpisodeResult:
    return EpisodeResult(
        suite="libero_goal",
        task_id=task_id,
        task=f"libero_goal/{task_id}",
        instruction="turn on the stove",
        init_state_id=init_state_id,
        scene_seed=0,
        is_success=is_success,
        num_steps=num_steps,
        attempts=1,
    )


def test_results_are_on_disk_as_they_come_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with ResultFile(path) as file:
        file.add(result(1, 0))
        file.add(result(1, 1, is_success=False))
        assert len(path.read_bytes().splitlines()) == 2
    path.write_bytes(path.read_bytes() + b'{"suite": "libero_go')  # killed while it wrote
    with ResultFile(path) as file:
        assert list(file.results.values()) == [result(1, 0), result(1, 1, is_success=False)]
        file.add(result(2, 0))
    with ResultFile(path) as file:
        assert len(file.results) == 3


def test_results_that_find_no_room_are_kept_and_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "episodes.jsonl", SmallDisk(monkeypatch)
    with ResultFile(path) as file:
        file.add(result(1, 0))
        disk.room = 50  # of a line of 180 bytes
        file.add(result(1, 1))
        file.add(result(1, 2))
        assert len(path.read_bytes().splitlines()) == 1
        assert (len(file.results), file.num_waiting) == (3, 2)
        disk.room = None
        assert file.num_waiting == 0
    assert list(ResultFile(path).results) == [("libero_goal/1", state, 0) for state in (0, 1, 2)]
    assert caplog.text.count("No space left on device") == 1


def test_an_episode_stands_in_the_results_once(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "episodes.jsonl") as file:
        file.add(result(1, 0))
        with pytest.raises(ConfigError, match="twice, expected every episode once"):
            file.add(result(1, 0, is_success=False))


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text('{"suite": 3}\n')
    with pytest.raises(ConfigError, match=r"episodes\.jsonl, line 1 is not a result"):
        ResultFile(tmp_path / "episodes.jsonl")


def test_a_summary_counts_by_task() -> None:
    results = [
        result(10, 0, False, 300),
        result(2, 0, True, 80),
        result(2, 1, True, 120),
        result(2, 2, False, 300),
    ]
    assert list(by_task(results)) == ["libero_goal/2", "libero_goal/10"]
    found = summary_of(by_task(results)["libero_goal/2"])
    assert (found["successes"], found["episodes"], found["mean_steps_of_successes"]) == (2, 3, 100)
    assert summary_of([result(1, 0, False)])["mean_steps_of_successes"] is None
