"""Empty modules for packages that a project imports and that the functions of interest
never touch.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence


def fake_packages(*packages: str) -> None:
    """Let `import package` succeed for each of these, and for anything inside of it, if it is not
    installed.
    """
    sys.meta_path.append(_Finder(packages))


class _Nothing:
    """A class, a function, a decorator or a value that does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __class_getitem__(cls, item: object) -> type:
        return cls

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> object:
        return {"type": "any"}

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> object:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
