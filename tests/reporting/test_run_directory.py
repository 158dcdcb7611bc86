"""Run directories: everything needed to make the run again, never two runs in one, refused at once
where unwritable.
"""

import json
import re
import shutil
import subprocess
import sys

import msgspec
import pytest

from vla_rl.errors import ConfigError
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.run_directory import require_digest
from vla_rl.types import Config


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
