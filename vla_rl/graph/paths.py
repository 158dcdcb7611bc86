"""Objects named by `"module:qualified.name"`."""

import importlib
import pkgutil
from typing import Any

from vla_rl.graph.errors import UnknownFunction, nearest


def resolve(path: str, context: str) -> Any:
    """Import the object named by `"module:qualified.name"`.

    Raises `UnknownFunction`, or the module's own error.
    """
    module_name, colon, qualified_name = path.partition(":")
    if not (colon and module_name and qualified_name):
        guess = (
            ":".join(path.rsplit(".", 1))
            if not colon and "." in path
            else "my_package.my_module:my_function"
        )
        raise UnknownFunction(
            f"{context}: {path!r} is not the path of a function, expected 'module:name', such as "
            f"{guess!r}"
        )
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise UnknownFunction(
            f"{context}: there is no module {module_name!r}{_nearest_module(module_name)} "
            "The module must be importable in this process."
        ) from None
    for part in qualified_name.split("."):
        if not hasattr(found, part):
            owner = getattr(found, "__name__", type(found).__name__)
            public = [name for name in dir(found) if not name.startswith("_")]
            raise UnknownFunction(f"{context}: {owner!r} has no {part!r}{nearest(part, public)}")
        found = getattr(found, part)
    return found


def _nearest_module(name: str) -> str:
    """Return a hint from the modules next to the first part of `name` that does not exist."""
    known: list[str] = []
    parts = name.split(".")
    for depth in range(len(parts)):
        parent = ".".join(parts[:depth])
        try:
            path = importlib.import_module(parent).__path__ if parent else None
        except (ImportError, AttributeError):
            break
        beside = [f"{parent}.{m.name}" if parent else m.name for m in pkgutil.iter_modules(path)]
        if ".".join(parts[: depth + 1]) not in beside:
            known = [".".join((candidate, *parts[depth + 1 :])) for candidate in beside]
            break
    hint = nearest(name, known)
    return hint if hint.endswith("?") else "."
