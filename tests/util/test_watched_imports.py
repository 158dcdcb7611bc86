"""A watched module is executed in another way, and every other import stays as it is."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from vla_rl.util.watched_imports import Execute, WatchedImports


@pytest.fixture
def watched(import_folder: Path) -> Iterator[WatchedImports]:
    (import_folder / "watched_sample.py").write_text("NUMBER = 1\n")
    (import_folder / "other_sample.py").write_text("NUMBER = 1\n")
    finder = WatchedImports()
    sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    yield finder
    sys.meta_path.remove(finder)


def doubled(execute: Execute, module: ModuleType) -> None:
    execute(module)
    module.NUMBER *= 2


def test_the_watched_module_is_executed_in_the_given_way(watched: WatchedImports) -> None:
    watched.watch("watched_sample", doubled)
    assert importlib.import_module("watched_sample").NUMBER == 2
    assert importlib.import_module("other_sample").NUMBER == 1


def test_a_second_import_does_not_execute_it_again(watched: WatchedImports) -> None:
    watched.watch("watched_sample", doubled)
    importlib.import_module("watched_sample")
    assert importlib.import_module("watched_sample").NUMBER == 2


def test_a_watched_module_that_is_not_there_is_not_found(watched: WatchedImports) -> None:
    watched.watch("no_such_sample", doubled)
    with pytest.raises(ModuleNotFoundError, match="no_such_sample"):
        importlib.import_module("no_such_sample")


def test_an_error_of_the_changed_execution_is_that_of_the_import(watched: WatchedImports) -> None:
    def broken(execute: Execute, module: ModuleType) -> None:
        raise ImportError("it does not fit")

    watched.watch("watched_sample", broken)
    with pytest.raises(ImportError, match="it does not fit"):
        importlib.import_module("watched_sample")
    assert "watched_sample" not in sys.modules
