"""Names that are imported on first use, or by another process.

`pa` and `pq` are pyarrow, imported when a function first uses it: it comes with an extra, and most runs
read none of its files. Quote annotations that name its types, because Python evaluates them when it
reads the function.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any


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
