"""Names and paths are printed as they are, whatever stands in them."""

import ast
import io
from pathlib import Path

from rich.table import Table

from vla_rl.reporting.progress import TaskTally
from vla_rl.reporting.summary import _task_table
from vla_rl.util.plain_console import plain_console

PACKAGE = Path(__file__).parents[2] / "vla_rl"
NAMES = ("open [the] box", "ends [/b] a style", "a :smile: in a folder", "[link=x]")


def test_brackets_and_colons_of_names_stay_in_tables_and_their_titles() -> None:
    console = plain_console(file=io.StringIO(), width=100)
    for name in NAMES:
        table = Table("task", title=name)
        table.add_row(name)
        console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert [printed.count(name) for name in NAMES] == [2, 2, 2, 2]


def test_a_run_whose_task_holds_an_end_of_markup_prints_its_summary() -> None:
    console = plain_console(file=io.StringIO(), width=100)
    console.print(_task_table({NAMES[1]: TaskTally(num_episodes=1)}))
    assert NAMES[1] in console.file.getvalue()  # type: ignore[attr-defined]


def test_every_console_of_the_package_is_a_plain_one() -> None:
    makers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Console"
    }
    assert makers == {"util/plain_console.py"}
