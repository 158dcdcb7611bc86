"""Executes chosen modules of other packages in a changed way at their first import.

It does so for every importer, and imports nothing before, so `vla_rl` can install it everywhere.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

Execute = Callable[[ModuleType], None]


class WatchedImports:
    """Finds the watched modules through the other finders, and executes them in its own way."""

    def __init__(self) -> None:
        self._executes: dict[str, Callable[[Execute, ModuleType], None]] = {}

    def watch(self, name: str, execute: Callable[[Execute, ModuleType], None]) -> None:
        """Have `execute` called with what would have executed the module, and the module."""
        self._executes[name] = execute

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a watched module; return None for every other import."""
        execute = self._executes.get(name)
        if execute is None:
            return None
        others = (
            finder
            for finder in sys.meta_path
            if finder is not self and hasattr(finder, "find_spec")
        )
        specs = (finder.find_spec(name, path, target) for finder in others)
        found = next((spec for spec in specs if spec is not None), None)
        if found is not None and found.loader is not None:
            changed = functools.partial(execute, found.loader.exec_module)
            found.loader.exec_module = changed  # type: ignore[method-assign]  # of this one loader
        return found


_watched = WatchedImports()


def watch(name: str, execute: Callable[[Execute, ModuleType], None]) -> None:
    """Watch for the import of a module, before all other finders.

    Args:
        name: the module.
        execute: called with what would have executed the module, and the module.
    """
    if _watched not in sys.meta_path:
        sys.meta_path.insert(0, _watched)
    _watched.watch(name, execute)
