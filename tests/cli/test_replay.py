"""`vla-rl replay` shows, checks and exports the rows of a replay buffer."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from episode_rows import LAYOUT, make_episode_rows

from vla_rl.cli.main import main as vla_rl
from vla_rl.cli.replay import main
from vla_rl.replay import ReplayBuffer
from vla_rl.replay.segments import list_segments
from vla_rl.util.ownership import name_lock_file, sole_owner


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run's folder with five episodes of two tasks, one of them imported."""
    with ReplayBuffer(tmp_path / "run" / "replay", LAYOUT) as buffer:
        shown = [make_episode_rows(90, is_success=True, task="open [the] box")]
        buffer.append(shown, is_demonstration=True, source="/data/demos")
        for number in range(4):
            task = ("open [the] box", "close it")[number % 2]
            buffer.append([make_episode_rows(number, is_success=number == 1, task=task)])
    return tmp_path / "run"


def test_show_counts_episodes_successes_and_rows_by_task_and_origin(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["show", str(run)]) == 0
    told = capsys.readouterr().out
    lines = [line.replace("│", " ").split() for line in told.splitlines()]
    assert "5 files" in told
    assert "residual head over the base abababababab" in told
    counted = [line[-5:] for line in lines if line[:1] in (["close"], ["open"], ["all"])]
    # successes of all tasks: the demonstration, and episode 1
    assert counted == [
        ["2", "1", "6", "0", "0"],
        ["1", "1", "3", "0", "0"],
        ["2", "0", "6", "0", "0"],
        ["5", "2", "15", "0", "0"],
    ]
    assert "demonstrations of /data/demos" in told


def test_check_names_every_damaged_file_and_fails(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(run / "replay")]) == 0
    assert "5 of 5 files are whole" in capsys.readouterr().out
    cut, flipped, *_ = list_segments(run / "replay")
    cut.write_bytes(cut.read_bytes()[:-1])
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    assert main(["check", str(run)]) == 1
    told = capsys.readouterr().out
    assert f"{cut} has " in told
    assert f"{flipped} is not what was written" in told
    assert "3 of 5 files are whole" in told
    assert main(["show", str(run)]) == 2


def test_a_damaged_file_leaves_no_half_of_a_data_set(run: Path, tmp_path: Path) -> None:
    last = list_segments(run / "replay")[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert main(["export", str(run), str(tmp_path / "dataset")]) == 2
    assert not (tmp_path / "dataset").exists()


def test_export_writes_all_columns_without_pickle(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.npz"
    assert main(["export", str(run), str(out)]) == 0
    with np.load(out, allow_pickle=False) as exported:
        assert set(exported) == {*LAYOUT.row_dtype.names, "task_names"}
        tasks = exported["task_names"][exported["task"]]
        assert dict(zip(exported["episode"].tolist(), tasks.tolist(), strict=True)) == {
            90: "open [the] box", 0: "open [the] box", 1: "close it", 2: "open [the] box", 3: "close it"
        }  # fmt: skip
        wanted = make_episode_rows(3).rows
        is_third = exported["episode"] == 3
        for name in set(LAYOUT.row_dtype.names) - {"task"}:
            assert np.array_equal(exported[name][is_third], wanted[name]), name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["show", "nowhere"], "nowhere has no rows"),
        (["export", "run", "rows.pkl"], "rows.pkl has another suffix"),
    ],
)
def test_a_folder_or_file_that_does_not_fit_is_one_error(
    arguments: list[str],
    told: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(arguments) == 2
    assert told in capsys.readouterr().err


def test_an_existing_file_is_not_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.npz"
    out.write_bytes(b"mine")
    assert main(["export", str(run), str(out)]) == 2
    assert out.read_bytes() == b"mine"
    assert "is there already" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["nowhere/rows.npz", "taken.npz/rows.npz", "taken.npz/decisions"])
def test_a_place_that_cannot_be_written_is_one_sentence(
    out: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "taken.npz").touch()
    assert main(["export", str(run), str(tmp_path / out)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path / out} cannot be written (")
    assert "make the folder, or name another one" in told
    assert "Errno" not in told


def test_rows_of_two_policies_in_one_folder_are_not_mixed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = msgspec.structs.replace(LAYOUT, base_digest="cd" * 32)
    with ReplayBuffer(tmp_path / "other", other) as buffer:
        for number in range(6):
            buffer.append([make_episode_rows(number, layout=other)])
    sixth = list_segments(tmp_path / "other")[-1]
    sixth.rename(run / "replay" / sixth.name)
    assert main(["export", str(run), str(tmp_path / "rows.npz")]) == 2
    assert "is of another policy than the first file: base_digest" in capsys.readouterr().err
    assert not (tmp_path / "rows.npz").exists()


def test_episodes_are_a_data_set_with_rewards_and_interventions_and_none_is_in_it_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    from vla_rl.datasets import read_lerobot

    episode = make_episode_rows(0, is_success=True)
    episode.rows["intervened"][1, 0] = True
    with ReplayBuffer(tmp_path / "buffer", LAYOUT) as buffer:
        buffer.append([episode, make_episode_rows(1, decisions=4)])
    target = tmp_path / "decisions"
    for number in (2, 0):
        assert main(["export", str(tmp_path / "buffer"), str(target)]) == 0
        assert capsys.readouterr().out == f"{target}: {number} new episodes\n"
    first, second = read_lerobot(target)
    assert (first.num_steps, second.num_steps) == (3, 4)
    assert first.actions.tolist() == episode.rows["action"].tolist()
    assert first.vectors["state"].tolist() == episode.rows["proprio"].tolist()
    assert first.vectors["features"].tolist() == episode.rows["features"].tolist()
    assert first.rewards is not None
    assert first.rewards.tolist() == [0, 0, 1]
    assert first.intervened is not None
    assert first.intervened.tolist() == [False, True, False]
    assert (first.is_success, second.is_success) == (True, False)


def test_a_data_set_that_another_process_writes_is_left_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyarrow")
    target = tmp_path / "decisions"
    with sole_owner(name_lock_file(target), "the data set"):
        assert main(["export", str(run), str(target)]) == 2
    assert "the data set" in capsys.readouterr().err
    assert not target.exists()


def test_rows_that_a_run_keeps_in_a_folder_of_their_own_are_found_from_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (run / "replay").rename(tmp_path / "large_disk")
    (run / "config.json").write_text(json.dumps({"seed": 1, "replay": {"folder": str(rows)}}))
    assert main(["check", str(run)]) == 0
    assert capsys.readouterr().out == "5 of 5 files are whole\n"
    # one that was moved away is named
    rows.rename(tmp_path / "moved")
    assert main(["show", str(run)]) == 2
    assert f"{rows}, which {run} keeps its rows in, has no rows" in capsys.readouterr().err
    # a policy has a file of this name too
    (run / "config.json").write_text('["replay"]')
    assert main(["show", str(run)]) == 2
    assert f"error: {run} has no rows" in capsys.readouterr().err


def test_the_program_knows_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vla_rl(["replay", "check", str(run)]) == 0
    assert "files are whole" in capsys.readouterr().out
