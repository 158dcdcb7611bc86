"""Imports SciPy and scikit-learn for transformers only once they are called.

transformers imports both with every language model, for one function of assisted generation and one
of object detection. Nothing here uses those, and they are a sixth of the time that the import of a
policy takes.
"""

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Final, NamedTuple

from vla_rl.watched_imports import Execute, watch


class _Use(NamedTuple):
    """An import that a module of transformers makes if a package is available."""

    asked: str
    """Function of transformers.utils that tells whether the package is available."""

    package: str
    function: str


_DETECTORS: Final = (
    "deformable_detr",
    "for_object_detection",
    "grounding_dino",
    "lw_detr",
    "rf_detr",
    "rt_detr",
)

USES: Final = MappingProxyType(
    {
        "transformers.generation.candidate_generator": _Use(
            "is_sklearn_available", "sklearn.metrics", "roc_curve"
        ),
        **dict.fromkeys(
            (f"transformers.loss.loss_{detector}" for detector in _DETECTORS),
            _Use("is_scipy_available", "scipy.optimize", "linear_sum_assignment"),
        ),
    }
)
"""Modules of transformers that every language model imports, by name."""


def install() -> None:
    """Watch for the imports of those modules; a second call does nothing."""
    for name, use in USES.items():
        watch(name, functools.partial(_execute, use))


_available: dict[str, Callable[[], bool]] = {}
"""transformers' own functions by name, once `_missing` has replaced them."""


def _missing() -> bool:
    return False


def _execute(use: _Use, execute: Execute, module: ModuleType) -> None:
    """Execute a module as if the package were missing, then hand it a function that imports it."""
    utils = sys.modules["transformers.utils"]
    before = getattr(utils, use.asked, None)
    # one of these modules imports another: the outer one has replaced the function already
    is_available = _available.get(use.asked) if before is _missing else before
    if is_available is None or not is_available():
        execute(module)
        return
    _available[use.asked] = is_available
    setattr(utils, use.asked, _missing)
    try:
        execute(module)
    finally:
        setattr(utils, use.asked, before)
    setattr(module, use.asked, is_available)
    setattr(module, use.function, _imported_when_called(use))


def _imported_when_called(use: _Use) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(use.package), use.function)(*args, **kwargs)

    return call
