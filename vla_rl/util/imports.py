"""Names that are imported later: on first use, by another process, or chosen by a configuration.

`pa` and `pq` are pyarrow, imported when a function first uses it: it comes with an extra, most runs
read none of its files. Quote annotations that name its types, because Python evaluates them when it
reads the function.
"""

import ast
import sys
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vla_rl.errors import ConfigError


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported on first use.

        if TYPE_CHECKING:
            from shapes.circle import Circle as Circle

        __getattr__, __dir__ = lazy_names(__name__)

    That block is the only list: editors and type checkers read it, and it is parsed here when the
    package is first asked for a name. `__all__` has the names of the block and those that the
    package imports at once, as `from x import A as A`.
    """

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(_public_names(package))
        module = _public_names(package).get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(module), name)
        setattr(sys.modules[package], name, found)  # found without this function from now on
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *_public_names(package)})

    return find, names


@cache
def _public_names(package: str) -> dict[str, str]:
    """Return the module of each name that the package's `__init__.py` imports under its own name."""
    loader: Any = getattr(find_spec(package), "loader", None)
    imports: list[ast.stmt] = []
    for statement in ast.parse(loader.get_source(package)).body:
        imports += statement.body if isinstance(statement, ast.If) else [statement]
    return {
        name.name: statement.module
        for statement in imports
        if isinstance(statement, ast.ImportFrom) and statement.module is not None
        for name in statement.names
        if name.asname == name.name
    }


def import_path(function: Callable[..., Any]) -> str:
    """Return `module:name` of a function or a class.

    Raises: TypeError for one that no other process can import.
    """
    module, name = function.__module__, getattr(function, "__qualname__", None)
    if name is None or "<" in name or hasattr(function, "__self__"):
        raise TypeError(
            f"{module}.{name or type(function).__qualname__} cannot be found by another process: "
            "put it at the top of a module"
        )
    return f"{main_module_name() if module == '__main__' else module}:{name}"


def main_module_name() -> str:
    """Return the name by which a child imports the program started here.

    Raises: TypeError in an interactive session.
    """
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return main.__spec__.name
    file = getattr(main, "__file__", None)
    if file is None:
        raise TypeError(
            "another process cannot import what an interactive session defines: put it in a file"
        )
    return Path(file).stem  # its folder is the first entry of sys.path, which the child takes over


__all__ = ["pa", "pq"]


if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:

    class _LazyModule:
        def __init__(self, name: str) -> None:
            self._module = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._module), name)

    pa, pq = _LazyModule("pyarrow"), _LazyModule("pyarrow.parquet")


T = TypeVar("T")


def choose(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`.

    Raises: ConfigError, with the nearest match and all names, if this `kind` has no such name.
    """
    check_choice(table, name, kind)
    return table[name]


def check_choice(names: Collection[str], name: str, kind: str) -> None:
    """Raise ConfigError with the nearest match unless `name` is one of `names`."""
    if name in names:
        return
    import difflib  # here: every process imports this file, few choose a wrong name

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{kind} {name!r} is unknown;{hint} known are: {', '.join(sorted(names))}.")


def is_function_path(name: str) -> bool:
    """Return whether a name has the form `module:function`."""
    return ":" in name


def load_function(path: str, kind: str) -> Any:
    """Return the function that `module:function` names.

    Raises: ConfigError if there is no such module or function.
    """
    module_name, _, function_name = path.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} {path!r}: module {error.name!r} cannot be found; is it on the path?"
        ) from error
    found: object = getattr(module, function_name, None)
    if not callable(found):
        import difflib

        functions = [name for name in vars(module) if callable(getattr(module, name))]
        near = difflib.get_close_matches(function_name, functions, n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{kind} {path!r}: {module_name!r} has no function {function_name!r};{hint}"
        )
    return found
