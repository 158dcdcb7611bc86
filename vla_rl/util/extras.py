"""An import of a package that is left to an extra fails with the command that installs it.

`vla_rl` installs the finder below all others, so it is asked only about what nothing else finds.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from vla_rl.errors import ConfigError

EXTRAS: Final = {
    "data": ("pyarrow", "h5py"),
    "text": ("aiohttp", "math_verify", "bm25s"),
}
"""Extras of the package that `vla-rl install` knows, with the modules that they bring."""

EXTRA_BY_MODULE: Final = {module: extra for extra, modules in EXTRAS.items() for module in modules}


class MissingExtra(ModuleNotFoundError, ConfigError):
    """A module that an extra of vla_rl brings is imported and not installed."""


class ExtraFinder:
    """Raises MissingExtra for imports of modules of an extra; lets `find_spec` return None."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return None. Raises: MissingExtra if an import statement needs a module of an extra."""
        extra = EXTRA_BY_MODULE.get(name)
        # Other packages ask importlib.util.find_spec whether, say, pyarrow is there.
        if extra is not None and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise MissingExtra(
                f"{name} is not installed, expected for what was asked; run `vla-rl install {extra}`.",
                name=name,
            )
        return None


def install() -> None:
    """Have missing modules of extras named from now on. May be called again."""
    if not any(isinstance(finder, ExtraFinder) for finder in sys.meta_path):
        sys.meta_path.append(ExtraFinder())
