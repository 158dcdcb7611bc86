"""Names are imported on first use, by another process, or as a configuration chooses."""

import functools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vla_rl.errors import ConfigError
from vla_rl.util.imports import (
    check_choice,
    choose,
    import_path,
    is_function_path,
    load_function,
    main_module_name,
)


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
