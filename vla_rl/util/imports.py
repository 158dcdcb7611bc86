"""Names that are imported later: on first use, by another process, or chosen by a configuration.

`pa` and `pq` are pyarrow, imported when a function first uses it: it comes with an extra, most runs
read none of its files. Quote annotations that name its types, because Python evaluates them when it
reads the function.
"""

import ast
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
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
    # A lambda, a function in a function, and a bound method have no name under which another
    # process finds them.
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


def check_choice(names: Collection[str], name: str, kind: str, *, also: str = "") -> None:
    """Raise ConfigError with the nearest match unless `name` is one of `names`.

    Args:
        names: what may be chosen.
        name: what was chosen.
        kind: what it is, for the error: "loss".
        also: what else may be chosen, for the error: "any `module:function`".
    """
    if name in names:
        return
    import difflib  # here: every process imports this file, few choose a wrong name

    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f" did you mean {near[0]!r}?" if near else ""
    known = f"{', '.join(sorted(names))}{f', and {also}' if also else ''}"
    raise ConfigError(f"{kind} {name!r} is unknown;{hint} known are: {known}.")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close to `name`, else up to 12 known names.

    Empty if there are more, or none.
    """
    import difflib  # here: every process imports this file, few choose a wrong name

    candidates = list(known)
    if close := difflib.get_close_matches(name, candidates, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(map(repr, candidates))}" if 0 < len(candidates) <= 12 else ""


def is_function_path(name: str) -> bool:
    """Return whether a name has the form `module:function`."""
    return ":" in name


def load_function(path: str, kind: str, error: type[Exception] = ConfigError) -> Any:
    """Return the function that `module:function` names.

    Raises: `error` if there is no such module or function; any error of the module itself.
    """
    return load_named(path, kind, "function", callable, error)


def load_named(
    path: str,
    kind: str,
    wanted: str,
    accepts: Callable[[Any], bool],
    error: type[Exception] = ConfigError,
) -> Any:
    """Return what `module:name` or `module:outer.name` names.

    Args:
        path: the name that a user wrote. For names that this package wrote, `pkgutil.resolve_name`
            is enough.
        kind: what the user chose, for the error: "loss".
        wanted: what it has to be, for the error: "function".
        accepts: returns whether it is one.
        error: class of the error for a path of another form, without such a module or such a name.

    Raises: `error`, with the nearest match; any error of the module itself.
    """
    module_name, _, name = path.partition(":")
    if not (module_name and name):
        dotted = "." in path and ":" not in path
        example = ":".join(path.rsplit(".", 1)) if dotted else f"my_module:my_{wanted}"
        raise error(
            f"{kind} {path!r} is not the path of a {wanted}, expected 'module:name', such as "
            f"{example!r}"
        )
    owner: Any = load_module(module_name, f"{kind} {path!r}", error)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part, None)
    found = getattr(owner, last, None)
    if accepts(found):
        return found
    # Only those that would be accepted: a class is no help for who misspelt a function.
    names = [each for each in dir(owner) if each[0] != "_" and accepts(getattr(owner, each))]
    raise error(f"{kind} {path!r}: {module_name!r} has no {wanted} {name!r}{suggest(last, names)}")


def load_module(name: str, described: str, error: type[Exception] = ConfigError) -> Any:
    """Import a module that a user named.

    Args:
        name: its dotted name.
        described: the choice that names it, for the error.
        error: class of the error for a module that is not there.

    Raises: `error`, with the nearest module; any other error of the module itself.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
            raise  # one that the module itself imports: its traceback says where
        raise error(
            f"{described}: module {missing.name!r} cannot be found; is it on the path?"
            f"{suggest(missing.name, _sibling_modules(missing.name))}"
        ) from missing


def _sibling_modules(name: str) -> list[str]:
    """Return the modules of the package that a missing module would be in."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    return [f"{parent}.{module.name}".lstrip(".") for module in pkgutil.iter_modules(path)]
