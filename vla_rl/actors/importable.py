"""Names by which another process imports a function or a class of this one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
