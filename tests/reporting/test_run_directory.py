"""Run directories: everything needed to make the run again, in files of records that are whole and in order."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from vla_rl.errors import ConfigError
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import FailureReporter, RetryingWriter, set_aside_lines
from vla_rl.reporting.run_directory import require_digest
from vla_rl.types import Config
from vla_rl.util.atomic_files import replace_file


class LearnerConfig(Config, frozen=True):
    learning_rate: float = 1e-4


class ExampleConfig(Config, frozen=True):
    suite: str = "libero_goal"
    learner: LearnerConfig = LearnerConfig()


def test_a_new_run_holds_its_config_and_versions(tmp_path) -> None:
    config = ExampleConfig(suite="libero_10", learner=LearnerConfig(learning_rate=5e-6))
    run = RunDirectory.create(tmp_path / "runs", "srpo_libero", config)
    assert run.path.parent == tmp_path / "runs"
    assert run.path.name.startswith("srpo_libero-")
    assert msgspec.json.decode(run.config.read_bytes(), type=ExampleConfig) == config
    about = json.loads((run.path / "versions.json").read_text())
    assert about["python"] == sys.version
    assert about["command"] == sys.argv
    assert about["packages"]["numpy"].split(".")[0] == "2"
    assert run.tensorboard.is_dir()
    assert run.checkpoints.is_dir()
    assert run.videos.is_dir()


def test_runs_of_one_name_in_one_second_get_folders_of_their_own(tmp_path) -> None:
    runs = [RunDirectory.create(tmp_path, "srpo", ExampleConfig()) for _ in range(3)]
    assert len({run.path for run in runs}) == 3


def test_resuming_opens_the_same_folder_and_notes_the_new_versions(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    run.metrics.write_text("kept\n")
    assert RunDirectory.resume(run.path) == run
    assert run.metrics.read_text() == "kept\n"
    assert (run.path / "versions-2.json").is_file()


def test_a_resume_with_another_configuration_notes_it(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    run.record_resume(ExampleConfig())
    assert [path.name for path in run.path.glob("config*.json")] == ["config.json"]
    run.record_resume(ExampleConfig(suite="libero_10"))
    assert run.config.name == "config-2.json"
    assert msgspec.json.decode(run.config.read_bytes(), type=ExampleConfig).suite == "libero_10"


def test_files_of_other_names_are_no_configurations_and_no_versions(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    for name in ("config-backup.json", "config_old.json", "configs.json", "versions-x.json"):
        (run.path / name).write_text("mine")
    assert run.config.name == "config.json"
    assert RunDirectory.resume(run.path) == run
    assert (run.path / "versions-2.json").is_file()
    run.record_resume(ExampleConfig(suite="libero_10"))
    assert run.config.name == "config-2.json"
    (run.path / "config-2.json").rename(run.path / "config-7.json")
    assert run.config.name == "config-7.json"


def test_a_configuration_that_is_not_as_it_was_written_is_refused_and_says_what_to_do(
    tmp_path,
) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    data = run.config.read_bytes()
    subprocess.run(
        ["sha256sum", "--check", "config.json.sha256"],
        cwd=run.path,
        check=True,
        capture_output=True,
    )
    require_digest(run.config, data)
    flipped = data.replace(b"libero_goal", b"libero_gnal")  # one bit
    with pytest.raises(
        ConfigError,
        match=r"config.json is not what was written .*remove config.json.sha256 to accept",
    ):
        require_digest(run.config, flipped)
    run.record_resume(ExampleConfig(suite="libero_10"))
    with pytest.raises(ConfigError, match=r"config-2.json is not what was written"):
        require_digest(run.config, data)


def test_the_configuration_of_an_older_run_has_no_digest_and_is_accepted(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    (run.path / "config.json.sha256").unlink()
    require_digest(run.config, b"anything")


def test_a_trace_never_takes_the_place_of_another(tmp_path) -> None:
    run, names = RunDirectory.create(tmp_path, "srpo", ExampleConfig()), []
    for first in (0, 0, 0, 7, 7):
        path = run.new_trace(first)
        path.write_text("kept")
        names.append(path.name)
    assert names == [
        "trace.json",
        "trace-from-000000-2.json",
        "trace-from-000000-3.json",
        "trace-from-000007.json",
        "trace-from-000007-2.json",
    ]


def test_a_directory_that_was_removed_is_noticed_and_can_be_made_again(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    assert run.is_there()
    shutil.rmtree(run.path)
    assert not run.is_there()
    run.path.mkdir()
    assert not run.is_there()  # a folder that something else made again is not the run's
    run.make_again(ExampleConfig(suite="libero_10"))
    assert run.is_there()
    assert msgspec.json.decode(run.config.read_bytes(), type=ExampleConfig).suite == "libero_10"
    assert RunDirectory.resume(run.path) == run


def test_resuming_what_is_no_run_names_the_runs_there_are(tmp_path) -> None:
    run = RunDirectory.create(tmp_path, "srpo", ExampleConfig())
    with pytest.raises(
        ConfigError, match=f"no config.json.*runs in .* are: {re.escape(run.path.name)}"
    ):
        RunDirectory.resume(tmp_path / "other")
    checkpoint = run.checkpoints / "update-000012"
    checkpoint.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=f"run {re.escape(str(run.path))}; .* --resume-from update-000012"
    ):
        RunDirectory.resume(checkpoint)
    with pytest.raises(ConfigError, match="holds no run"):
        RunDirectory.resume(tmp_path / "nowhere" / "at_all")


def test_a_folder_that_cannot_be_written_is_one_clear_error(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ConfigError, match=r"the run directory .*file/runs cannot be written .*Not a directory"
    ):
        RunDirectory.create(tmp_path / "file" / "runs", "srpo", ExampleConfig())


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden"])
def test_a_name_that_cannot_be_a_folder_is_refused(tmp_path, name) -> None:
    with pytest.raises(ConfigError, match="run name"):
        RunDirectory.create(tmp_path, name, ExampleConfig())


def test_the_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for content in (b"first", b"2"):
        replace_file(file, content)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_part_of_the_new_one(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.json"
    replace_file(file, b"first")

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        replace_file(file, b"second")
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "none" / "state.json", b"")


class FullDisk:
    """Takes records while it is `open`; `poison` is never taken."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []

    def take(self, record: str) -> None:
        if record == "poison":
            raise ValueError("not this one")
        if not self.is_open:
            raise OSError(28, "No space left on device", "disk.txt")
        self.taken.append(record)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_finds_no_room_waits_and_is_written_in_order_when_there_is_some(
    warnings: Callable[[], list[str]],
) -> None:
    disk = FullDisk()
    writer = RetryingWriter("the disk", disk.take)
    writer.put("update 1", "a")
    disk.is_open = False
    writer.put("update 2", "b")
    writer.put("update 3", "c")
    assert (disk.taken, writer.waiting) == (["a"], ["b", "c"])
    disk.is_open = True
    writer.put("update 4", "d")
    assert (disk.taken, writer.waiting) == (["a", "b", "c", "d"], [])
    assert warnings() == [
        "the disk failed at update 2: [Errno 28] No space left on device: 'disk.txt'; it waits "
        "in memory and is "
        "tried again with the next one",
        "the disk works again, after 2 failures",
    ]


def test_a_record_that_would_always_fail_is_left_out_and_holds_up_no_other(
    warnings: Callable[[], list[str]],
) -> None:
    disk = FullDisk()
    writer = RetryingWriter("the disk", disk.take)
    for number, record in enumerate(("a", "poison", "b"), start=1):
        writer.put(f"update {number}", record)
    assert disk.taken == ["a", "b"]
    assert (
        warnings()[0] == "the disk failed at update 2: ValueError('not this one'); it is left out"
    )


def test_the_oldest_are_left_out_when_too_many_wait(warnings: Callable[[], list[str]]) -> None:
    disk = FullDisk()
    disk.is_open = False
    writer = RetryingWriter("the disk", disk.take, most_waiting=2)
    for number in range(1, 6):
        writer.put(f"update {number}", str(number))
    assert writer.waiting == ["4", "5"]
    assert [text for text in warnings() if "update 1 is left out" in text] == [warnings()[1]]
    assert len(warnings()) == 2
    writer.close()
    assert warnings()[-1] == "the disk: 2 records were never written, the first of them update 4"


def test_closing_writes_what_waits_and_reports_what_fails_to_close(
    warnings: Callable[[], list[str]],
) -> None:
    disk = FullDisk()

    def fail() -> None:
        raise ConnectionError("gone")

    writer = RetryingWriter("the disk", disk.take, fail)
    disk.is_open = False
    writer.put("update 1", "a")
    disk.is_open = True
    writer.close()
    assert disk.taken == ["a"]
    assert warnings()[-1].startswith("the disk failed to close")


def test_of_failures_in_a_row_the_first_is_reported_in_one_line_and_then_that_they_are_over(
    warnings: Callable[[], list[str]],
) -> None:
    reporter = FailureReporter("writing videos", "a later one is tried")
    for _ in range(2):
        for number in range(3):
            reporter.failed(f"video {number}", OSError("ffmpeg:\nno room\n"))
        reporter.worked()
        reporter.worked()
    assert reporter.num_failed == 6
    first = "writing videos failed at video 0: ffmpeg: no room; a later one is tried"
    assert warnings() == [first, "writing videos works again, after 3 failures"] * 2


def small(line: bytes) -> bool:
    return int(json.loads(line)["n"]) < 3


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % number for number in numbers)


def test_lines_that_are_not_kept_move_beside_the_file(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    file.write_bytes(lines(1, 3, 2, 4))
    set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 2)
    assert undone.read_bytes() == lines(3, 4)


def test_damaged_lines_move_too_and_one_line_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    file.write_bytes(lines(1) + b'{"n": \xff}\n' + lines(2, 3) + b'{"n": "x"}\n{"n": ')
    set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 2)
    assert undone.read_bytes() == b'{"n": \xff}\n' + lines(3) + b'{"n": "x"}\n{"n": \n'
    said = f"{file}: lines 2, 5, 6 are damaged, moved to metrics-undone.jsonl\n"
    assert capsys.readouterr().out == said


def test_a_whole_last_line_without_its_newline_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(1, 2).removesuffix(b"\n"))
    set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capsys.readouterr().out == ""


def test_lines_of_a_second_resume_stand_below_those_of_the_first(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    for line in (lines(7), lines(8)):
        file.write_bytes(lines(1) + line)
        set_aside_lines(file, small)
    assert undone.read_bytes() == lines(7, 8)


def test_where_nothing_is_undone_there_is_no_second_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    set_aside_lines(file, small)
    file.write_bytes(lines(1, 2))
    set_aside_lines(file, small)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failure_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(1, 3))

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 3)
