"""Names of a package that are imported on first use."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from vla_rl.renamed import renamed_attribute


def lazy_names(
    package: str, home: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported on first use.

        __getattr__, __dir__ = lazy_names(__name__, {"runtime": ("Runtime", "ActorInfo")})

    `__getattr__` finds names that were renamed, too.

    Args:
        package: the package's own name.
        home: for each module below the package, the names that it has.
    """
    module_of = {name: module for module, names in home.items() for name in names}

    def find(name: str) -> Any:
        if name in module_of:
            found = getattr(import_module(f"{package}.{module_of[name]}"), name)
            setattr(sys.modules[package], name, found)  # found without this function from now on
            return found
        if (renamed := renamed_attribute(package, name)) is not None:
            return renamed
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return find, names
