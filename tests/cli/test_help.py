"""Help of a recipe: the options that it reads, in its own words, without waiting for torch.

Every option is explained by a page, or set by a recipe.
"""

import fcntl
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec
import pytest

import vla_rl
from tests.cli.test_command_line import RunSettings
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.help import COMMON, program_name
from vla_rl.pipelines.config import TrainingConfig
from vla_rl.recipes.grpo_driving import DrivingConfig
from vla_rl.recipes.grpo_text import GrpoTextConfig
from vla_rl.recipes.sft_libero import SftLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig, SuiteTrainingConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.types import Config

PROGRAM = """
import sys
from vla_rl.cli.command_line import TrainingLaunch; from vla_rl.cli.launch import run_recipe
from vla_rl.pipelines.config import TrainingConfig

sys.exit(run_recipe(TrainingLaunch, TrainingConfig, None, "A run."))
"""
"""A recipe that imports no torch, so that its help is there at once."""

ROOT: Final = Path(__file__).parents[2]
RECIPES: Final = Path(vla_rl.__file__).parent / "recipes"
PAGES: Final = "\n".join(
    page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
)


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
        length = len(print_help(TrainingConfig, capsys, "--help-all").encode())
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


def print_help(
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
    text = print_help(SrpoToyConfig, capsys, "--help")
    for option in ("--dry-run", "--resume", "--task-ids", "--run.updates", "--simulators.num-envs"):
        assert option in text
    for option in ("--run.stall-warning-s", "--learner.loss.kl.coef", "--critic."):
        assert option not in text
    everything = print_help(SrpoToyConfig, capsys, "--help-all")
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
    text = " ".join(print_help(RunSettings, capsys, "--help-all").split())
    for phrase in (
        "--rollout.num-envs",
        "Environments run at the same time.",
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
    text = print_help(Wordy, capsys, "--help", description=description)
    assert text.startswith(f"usage: {program_name()} [-h]")
    assert "\nOne line of the source that goes on for a while, and another.\n" in text
    assert "\n    a drawing ─► that stays\n        as it is\n" in text
    assert (
        "as a line of the source may be, and then some "
        "more, which stands in the line below." in text
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert (
        max(map(len, print_help(Wordy, capsys, "--help", description=description).splitlines()))
        <= 60
    )


def test_the_common_options_exist_in_a_recipe() -> None:
    tables: dict[str, type[Config]] = {}
    waiting: list[type[Config]] = [
        SrpoLiberoConfig,
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
        ("vla_rl.cli.report", "/x/__main__.py", "python -m vla_rl.cli.report"),
        (None, "/x/bin/vla-rl-srpo-libero", "vla-rl-srpo-libero"),
    ):
        main.__spec__ = None if spec is None else ModuleSpec(spec, None)
        monkeypatch.setattr(sys, "argv", [script])
        assert program_name() == name


PROBE = """
import contextlib, io, json, sys
from importlib import import_module
from vla_rl.cli.main import recipes

def status_of(name, *arguments):
    sys.argv = ["vla-rl " + name, *arguments]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            return import_module("vla_rl.recipes." + name).cli()
        except SystemExit as stopped:
            return stopped.code

slow = {"torch", "transformers", "timm", "matplotlib", "vllm"}
helps = [[name, "--help"] for name in recipes()] + [["srpo_libero", "--help-all"], ["grpo_text", "--help-all"]]
for command in helps + json.loads(sys.argv[1]):
    print(json.dumps([command, status_of(*command), sorted(slow & set(sys.modules))]))
"""

WRONG_COMMANDS = [
    ["srpo_libero", "--group-sise", "8"],
    ["srpo_libero", "--group-size", "0"],
    ["srpo_libero", "--pipeline", "embodied_spro"],
]


def test_help_of_every_recipe_and_errors_in_its_options_import_no_network() -> None:
    """Ask one process for all of them: what any of them imports stays there to be seen."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(WRONG_COMMANDS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line for line in lines if line[2]] == []
    statuses = {tuple(command): status for command, status, _ in lines}
    assert len(statuses) > 10 + 2 + len(WRONG_COMMANDS)
    assert {command for command, status in statuses.items() if status != 0} == {
        tuple(command) for command in WRONG_COMMANDS
    }
    assert {statuses[tuple(command)] for command in WRONG_COMMANDS} == {2}


def tables() -> Iterator[Config]:
    """Yield every recipe's configuration and its tables, with the recipe's values."""
    for path in sorted(RECIPES.glob("*.py")):
        module = importlib.import_module(f"vla_rl.recipes.{path.stem}")
        for kind in vars(module).values():
            is_own = isinstance(kind, type) and kind.__module__ == module.__name__
            if is_own and issubclass(kind, Config):
                fields = msgspec.structs.fields(kind)
                if not any(field.required for field in fields):
                    yield from nested(kind())


def nested(table: Config) -> Iterator[Config]:
    yield table
    for name in table.__struct_fields__:
        if isinstance(inner := getattr(table, name), Config):
            yield from nested(inner)


def keys(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield key
        if isinstance(value, dict):
            yield from keys(value)


@cache
def is_explained(option: str) -> bool:
    """Whether a page has the option: on a command line, in a file or in code."""
    kebab = option.replace("_", "-")
    if re.search(rf"--(?:no-)?(?:[\w-]+\.)*{kebab}(?![\w-])|`[^`\n]*\b{option}\b[^`\n]*`", PAGES):
        return True
    return re.search(rf"\b{option}\b" if "_" in option else rf"\b{option} ?= ?", PAGES) is not None


def test_every_option_is_explained_by_a_page_or_set_by_a_recipe() -> None:
    shipped = {
        key
        for path in (RECIPES / "configs").glob("*.toml")
        for key in keys(tomllib.loads(path.read_text()))
    }
    missing, found = set[str](), set[str]()
    for table in tables():
        for field in msgspec.structs.fields(type(table)):
            name, value = field.name, getattr(table, field.name)
            option = f"{type(table).__name__}.{name}"
            has_factory = field.default_factory is not msgspec.NODEFAULT
            default = field.default_factory() if has_factory else field.default
            is_set = not isinstance(value, Config) and value != default
            if is_set or name in shipped or is_explained(name):
                found.add(option)
            else:
                missing.add(option)
    assert sorted(missing - found) == []
    assert len(found) > 250


def test_every_option_in_a_table_of_options_exists() -> None:
    known = {name for table in tables() for name in table.__struct_fields__}
    known |= {"from"}  # of the supervised recipes, where Python takes the word
    named, in_table = set[str](), False
    for line in PAGES.splitlines():
        is_head = line.startswith("| option")
        in_table = is_head or (in_table and line.startswith("|"))
        if in_table and not is_head:
            first = line.split("|")[1]
            named |= {each.lstrip("-").split()[0] for each in re.findall(r"`([^`]+)`", first)}
    assert len(named) > 80
    last_parts = {name: name.split(".")[-1].replace("-", "_") for name in named}
    assert sorted(name for name, last in last_parts.items() if last not in known) == []
