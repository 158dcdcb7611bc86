"""Printing to a terminal, pipe or disk that is gone or full: what is printed is dropped, and
nothing is raised.
"""

import ast
import errno
import io
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from vla_rl.cli.main import COMMANDS, RECIPES
from vla_rl.run.terminal import lasting_output


def printed_to(program: str, **streams: int) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        **streams,
    )


def test_a_pipe_without_a_reader_is_not_even_an_exit_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = """
        import sys
        from rich.console import Console
        from vla_rl.run.terminal import lasting_output
        with lasting_output():
            for number in range(3):
                print("x" * 100_000, flush=number == 1)
            print("a word", file=sys.stderr)
            Console().print("a table")
        sys.exit(7)
    """
    done = printed_to(program, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 7


def test_a_log_file_on_a_full_disk_is_written_again_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Disk(io.StringIO):
        is_full = False

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    with lasting_output():
        print("one")
        disk.is_full = True
        print("two", flush=True)
        disk.is_full = False
        print("three")
        assert sys.stdout.isatty() is False
    assert disk.getvalue() == "one\nthree\n"
    assert sys.stdout is disk


def test_letters_that_the_output_cannot_encode_are_escaped() -> None:
    program = """
        import sys
        from rich.console import Console
        from rich.table import Table
        from vla_rl.run.terminal import lasting_output
        with lasting_output():
            print("pr\\xfcfung", flush=True)
            sys.stdout.writelines(["\\u4e0a\\n"])
            table = Table("task")
            table.add_row("pr\\xfcfung \\u2713")
            Console(width=40).print(table)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    first, second, *table = done.stdout.decode("ascii").splitlines()
    assert (first, second) == (r"pr\xfcfung", r"\u4e0a")
    assert any(r"pr\xfcfung \u2713" in line for line in table)


MAINS = {
    "vla_rl.cli.main": "main",
    **dict.fromkeys(COMMANDS.values(), "main"),
    "vla_rl.cli.command_line": "run_recipe",
    "vla_rl.recipes.record_demonstrations": "cli",
    "vla_rl.run.train": "train",
    "vla_rl.run.training_run": "execute",
    "vla_rl.run.supervised": "train_supervised",
}
"""Functions that print for a whole command or run, by module."""


@pytest.mark.parametrize("module", MAINS)
def test_each_command_and_run_prints_to_lasting_output(module: str) -> None:
    found = find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        found = find_spec(f"{module}.__main__")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == MAINS[module]
    ]
    assert any("lasting_output()" in ast.unparse(function) for function in functions)


def test_each_recipe_runs_by_a_function_that_prints_to_lasting_output() -> None:
    recipes = [path for path in RECIPES.glob("*.py") if "__main__" in path.read_text()]
    others = [
        path.stem
        for path in recipes
        if "run_recipe(" not in path.read_text() and "lasting_output()" not in path.read_text()
    ]
    assert others == []
