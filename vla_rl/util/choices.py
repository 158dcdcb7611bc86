"""Functions that a config picks by name or as `module:function`.

Unknown names are rejected with the nearest match.
"""

import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from vla_rl.errors import ConfigError

T = TypeVar("T")


def chosen(table: Mapping[str, T], name: str, kind: str) -> T:
    """Return `table[name]`.

    Raises: ConfigError, with the nearest match and all names, if this `kind` has no such name.
    """
    check_choice(table, name, kind)
    return table[name]


def check_choice(names: Collection[str], name: str, kind: str) -> None:
    """Raise ConfigError with the nearest match unless `name` is one of `names`."""
    if name in names:
        return
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
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{kind} {path!r}: module {error.name!r} cannot be found; is it on the path?"
        ) from error
    found: object = getattr(module, function_name, None)
    if not callable(found):
        functions = [name for name in vars(module) if callable(getattr(module, name))]
        near = difflib.get_close_matches(function_name, functions, n=1)
        hint = f" did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{kind} {path!r}: {module_name!r} has no function {function_name!r};{hint}"
        )
    return found
