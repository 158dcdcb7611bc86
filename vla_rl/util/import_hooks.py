"""Hooks on the imports of other packages, which `import vla_rl` installs.

They change how three things are imported, for every importer; nothing is imported before.

    torchvision       its wheel on the package index is built for CUDA; with a CPU-only torch its C++
                      library cannot be loaded, so that its Python code fails (`operator torchvision::nms
                      does not exist`). Two operators that it never calls on its own are declared, which
                      is enough for timm, transformers, peft or vLLM, which import it
    gymnasium         since release 1.0 it loads no entry points: an id is known once a package is
                      imported. With the hook, `import vla_rl` is enough for `gymnasium.make("vla_rl/<id>")`,
                      in either order of the imports
    pyarrow, gguf     a module that an extra of vla_rl brings, if it is missing, fails with the command that
                      installs it. This finder stands below all others: it is asked only about what
                      nothing else finds
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from vla_rl.errors import ConfigError

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
            # Only this loader is changed, and only for a module that is watched: every other import
            # pays one look-up in a dict.
            changed = functools.partial(execute, found.loader.exec_module)
            found.loader.exec_module = changed  # type: ignore[method-assign]  # of this one loader
        return found


_watched = WatchedImports()


def watch_import(name: str, execute: Callable[[Execute, ModuleType], None]) -> None:
    """Watch for the import of a module, before all other finders.

    Args:
        name: the module.
        execute: called with what would have executed the module, and the module.
    """
    if _watched not in sys.meta_path:
        sys.meta_path.insert(0, _watched)
    _watched.watch(name, execute)


_declared: list[Any] = []
"""Keeps the declarations alive; empty unless torchvision needs them."""


def _execute_torchvision(execute: Execute, module: ModuleType) -> None:
    try:
        execute(module)
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _declared:
            raise
        _declare_operators()
        execute(module)


def _declare_operators() -> None:
    import torch  # torchvision has imported it already

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    _declared.append(library)


def declare_torchvision_operators() -> None:
    """Watch for the import of torchvision; a second call does nothing."""
    watch_import("torchvision", _execute_torchvision)


EXTRAS: Final = {
    "data": ("pyarrow", "h5py"),
    "text": ("aiohttp", "math_verify", "bm25s"),
    "gguf": ("gguf",),
    "serve": ("websockets",),
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


def explain_missing_extras() -> None:
    """Have missing modules of extras named from now on. May be called again."""
    if not any(isinstance(finder, ExtraFinder) for finder in sys.meta_path):
        sys.meta_path.append(ExtraFinder())


def _execute_gymnasium(execute: Execute, module: ModuleType) -> None:
    execute(module)
    importlib.import_module("vla_rl.envs")


def register_env_ids() -> None:
    """Register our environments with gymnasium: now if it has been imported, else with its import."""
    if "gymnasium" in sys.modules:
        importlib.import_module("vla_rl.envs")
    else:
        watch_import("gymnasium.envs", _execute_gymnasium)
