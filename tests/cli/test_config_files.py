"""A configuration comes from a file and the command line, and nothing in either is ignored."""

import fcntl
import os
import re
import shlex
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import get_type_hints

import pytest

from vla_rl.cli.command_help import COMMON, program_name
from vla_rl.cli.command_line import Launch, TrainingLaunch, explain, parse_command
from vla_rl.cli.config_files import read_config
from vla_rl.errors import CheckpointError, ConfigError, EnvError, GraphError
from vla_rl.pipelines.config import TrainingConfig
from vla_rl.recipes.grpo_driving import DrivingConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.recipes.srpo_libero import LiberoConfig, SuiteTrainingConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.types import Config


class RolloutSettings(Config):
    """How episodes are played."""

    num_envs: int = 4
    """Environments played at the same time."""

    def __post_init__(self) -> None:
        self.require(self.num_envs > 0, "num_envs", "at least 1 environment")


class RunSettings(Config):
    """A run."""

    updates: int = 10
    """Updates to make."""

    tasks: tuple[int, ...] = (0,)
    """Tasks to train on."""

    rollout: RolloutSettings = RolloutSettings()


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("tasks = [1, 2]\n[rollout]\nnum_envs = 2\n")
    assert read_config(path, RunSettings) == RunSettings(
        tasks=(1, 2), rollout=RolloutSettings(num_envs=2)
    )


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("updates = 3\n[rollout]\nnum_envs = 2\n")
    command = parse_command(
        TrainingLaunch,
        RunSettings,
        "A run.",
        ["--config", str(path), "--updates", "5", "--dry-run"],
    )
    assert command.config == RunSettings(updates=5, rollout=RolloutSettings(num_envs=2))
    assert command.launch.dry_run


def test_a_file_and_a_run_to_go_on_with_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--config my\.toml and --resume runs/one were both given, expected one of them",
    ):
        parse_command(
            TrainingLaunch, RunSettings, "A run.", ["--config", "my.toml", "--resume", "runs/one"]
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("updats = 3", "unknown key 'updats' of RunSettings; did you mean 'updates'"),
        (
            "[rollout]\nnum_env = 3",
            "unknown key 'num_env' of RolloutSettings; did you mean 'num_envs'",
        ),
        ("zzz = 3", "known keys: rollout, tasks, updates"),
        ("updates = 'three'", "Expected `int`, got `str`"),
        ("rollout = 3", "got 3, expected a table of RolloutSettings"),
        (
            "[rollout]\nnum_envs = 0",
            "RolloutSettings.num_envs is 0, expected at least 1 environment",
        ),
        ("updates = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_file_and_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(path, RunSettings)
    assert message in str(caught.value)
    assert "run.toml" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        read_config(tmp_path / "none.toml", RunSettings)


PROGRAM = """
import sys
from vla_rl.cli.command_line import TrainingLaunch, run_recipe
from vla_rl.pipelines.config import TrainingConfig

sys.exit(run_recipe(TrainingLaunch, TrainingConfig, None, "A run."))
"""
"""A recipe that imports no torch, so that its help is there at once."""


def test_help_may_be_read_in_part(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    helped = shlex.join([sys.executable, str(program), "--help"])
    command = f"set -o pipefail; {helped} | head -1"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.startswith("usage:")
    assert result.stderr == ""


def test_help_may_be_read_until_only_its_last_buffer_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", PROGRAM, "--help-all"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with monkeypatch.context() as patch:
        # as in that process, which is called `-c`
        patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        patch.setattr(sys, "argv", ["-c"])
        length = len(help_of(TrainingConfig, capsys, "--help-all").encode())
    reading, writing = os.pipe()
    page = fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, 4096)
    with subprocess.Popen(
        command, stdout=writing, stderr=subprocess.PIPE, env=environment
    ) as program:
        os.close(writing)
        num_read = 0
        while num_read < length - 2 * page:
            num_read += len(os.read(reading, length - 2 * page - num_read))
        os.close(reading)  # what the program writes now, it writes as it exits
        assert program.stderr is not None
        assert program.stderr.read() == b""
        assert program.wait() == 0


def help_of(
    config: type[Config],
    capsys: pytest.CaptureFixture[str],
    *arguments: str,
    description: str = "A run.",
) -> str:
    with pytest.raises(SystemExit) as done:
        parse_command(TrainingLaunch, config, description, [*arguments])
    assert done.value.code == 0
    return capsys.readouterr().out


def test_help_shows_a_recipes_own_options_and_the_common_ones_of_its_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(SrpoToyConfig, capsys, "--help")
    for option in ("--dry-run", "--resume", "--task-ids", "--run.updates", "--simulators.num-envs"):
        assert option in text
    for option in ("--run.stall-warning-s", "--learner.loss.kl.coef", "--critic."):
        assert option not in text
    everything = help_of(SrpoToyConfig, capsys, "--help-all")
    num_shown, num_all = (
        len(re.findall(r"^\W*--[a-z][\w.-]+[ ,]", each, re.MULTILINE))
        for each in (text, everything)
    )
    assert f"{num_all - num_shown} more options: " in text.splitlines()[-1]
    assert text.splitlines()[-1].endswith(" --help-all")
    assert num_shown < num_all / 3


def test_all_help_explains_every_option_in_its_own_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(help_of(RunSettings, capsys, "--help-all").split())
    for phrase in (
        "--rollout.num-envs",
        "Environments played at the same time.",
        "--dry-run",
        "--resume",
        "--draw",
    ):
        assert phrase in text
    assert "more options" not in text


def test_help_fills_its_paragraphs_to_the_width_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wordy(Config, frozen=True, kw_only=True):
        size: int = 1
        """First a sentence that is about as long as a line of the source may be, and then
        some more, which stands in the line below.

        Another paragraph."""

    description = """Words: `a command`.

    One line of the source that goes on for
    a while, and another.

        a drawing ─► that stays
            as it is
    """
    monkeypatch.setenv("COLUMNS", "200")
    text = help_of(Wordy, capsys, "--help", description=description)
    assert text.startswith(f"usage: {program_name()} [-h]")
    assert "\nOne line of the source that goes on for a while, and another.\n" in text
    assert "\n    a drawing ─► that stays\n        as it is\n" in text
    assert (
        "as a line of the source may be, and then some "
        "more, which stands in the line below." in text
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        max(map(len, help_of(Wordy, capsys, "--help", description=description).splitlines())) <= 60
    )


def test_the_common_options_exist_in_a_recipe() -> None:
    tables: dict[str, type[Config]] = {}
    waiting: list[type[Config]] = [
        LiberoConfig,
        SuiteTrainingConfig,
        GrpoTextConfig,
        SftLiberoConfig,
        DrivingConfig,
        SrpoToyConfig,
        TrainToyConfig,
    ]
    while waiting:
        config = waiting.pop()
        tables[config.__name__] = config
        waiting += [
            kind
            for kind in get_type_hints(config).values()
            if isinstance(kind, type) and issubclass(kind, Config)
        ]
    for name, fields in COMMON.items():
        assert set(fields) <= set(tables[name].__struct_fields__), name


def test_a_programs_name_is_how_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    for spec, script, name in (
        ("vla_rl.recipes.srpo_toy", "/x/srpo_toy.py", "python -m vla_rl.recipes.srpo_toy"),
        ("vla_rl.cli.report.__main__", "/x/__main__.py", "python -m vla_rl.cli.report"),
        (None, "/x/bin/vla-rl-srpo-libero", "vla-rl-srpo-libero"),
    ):
        main.__spec__ = None if spec is None else ModuleSpec(spec, None)
        monkeypatch.setattr(sys, "argv", [script])
        assert program_name() == name


def test_an_unknown_option_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse_command(TrainingLaunch, RunSettings, "A run.", ["--updats", "3"])
    assert done.value.code == 2
    assert "--updates" in capsys.readouterr().err


def test_a_recipe_without_a_graph_has_no_option_to_draw_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_command(Launch, RunSettings, "A run.", ["--draw", "graph.svg"])
    assert "--draw" in capsys.readouterr().err


def test_a_mistake_in_a_node_is_explained_with_its_own_traceback() -> None:
    try:
        try:
            raise ZeroDivisionError("a mistake")
        except ZeroDivisionError as mistake:
            raise GraphError("node 'reward' failed in update 3") from mistake
    except GraphError as error:
        text = explain(error)
    assert text.startswith("error: GraphError: node 'reward' failed in update 3")
    assert "Traceback" in text
    assert "ZeroDivisionError: a mistake" in text


def test_a_damaged_file_is_explained_in_two_lines() -> None:
    error = CheckpointError("model.safetensors is damaged")
    error.__cause__ = ValueError("header too short")
    assert explain(error).splitlines() == [
        "error: CheckpointError: model.safetensors is damaged",
        "because of: ValueError: header too short",
    ]


def test_one_error_of_many_tasks_is_explained_once() -> None:
    group = ExceptionGroup(
        "tasks", [ExceptionGroup("more", [EnvError("no room")]), EnvError("no room")]
    )
    group.add_note("while starting")
    assert explain(group).splitlines() == [
        "error: EnvError: no room",
        "while starting",
        "1 more task failed in the same way",
    ]


def test_different_errors_of_several_tasks_are_explained_one_after_the_other() -> None:
    text = explain(ExceptionGroup("tasks", [EnvError("no room"), ConfigError("no seed")]))
    assert text.splitlines() == [
        "2 errors:",
        "error: EnvError: no room",
        "error: ConfigError: no seed",
    ]


def test_what_a_node_said_of_its_cause_is_not_said_twice() -> None:
    failed, cause = GraphError("node 'reward' failed: EnvError: no success"), EnvError("no success")
    cause.add_note("while playing episode 7")
    failed.__cause__ = cause
    assert explain(failed).splitlines() == [
        "error: GraphError: node 'reward' failed: EnvError: no success",
        "while playing episode 7",
    ]


def test_a_deliberate_error_is_explained_without_a_traceback_but_with_its_notes() -> None:
    failed, cause = GraphError("node 'rollout' failed in update 0"), EnvError("my/env: step raised")
    cause.add_note("while playing episode 7")
    failed.__cause__ = cause
    assert explain(failed).splitlines() == [
        "error: GraphError: node 'rollout' failed in update 0",
        "because of EnvError: my/env: step raised",
        "while playing episode 7",
    ]
