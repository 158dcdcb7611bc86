"""Names under which another process finds a function or a class."""

import functools
import sys
from types import ModuleType
from typing import Any

import pytest

from vla_rl.actors.importable import import_path, main_module_name


class Lamp:
    """A class with a class of its own."""

    class Bulb:
        """The inner one."""

    def shine(self) -> None:
        """Do nothing."""


def test_a_class_is_named_by_its_module_and_its_place_in_it() -> None:
    assert import_path(Lamp).endswith("test_importable:Lamp")
    assert import_path(Lamp.Bulb).endswith("test_importable:Lamp.Bulb")


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
