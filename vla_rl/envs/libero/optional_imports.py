"""Optional modules that LIBERO-plus and LIBERO-PRO import but most of their tasks never use: gym,
ImageMagick, scikit-image.

Only their vector environments use `gym`, and `gymnasium` satisfies their type hints as well; gym
itself prints a warning when it is imported with NumPy 2. ImageMagick (Wand) adds motion blur,
scikit-image adds Gaussian and glass blur: three of LIBERO-plus's five kinds of noise. A task with
such a noise raises `EnvError` at its first picture if the module is missing; all other tasks run
without.
"""

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import gymnasium

from vla_rl.errors import EnvError

_WAND = ("wand", "wand.api", "wand.image")
_SKIMAGE = ("skimage", "skimage.filters")


@contextlib.contextmanager
def without_optional_modules() -> Iterator[None]:
    """Let imports of these modules succeed inside the block, whether or not they are installed."""
    modules: dict[str, Any] = {} if "gym" in sys.modules else {"gym": gymnasium}
    if not _can_import("wand.api", _WAND):
        modules |= {name: types.ModuleType(name) for name in _WAND}
        modules["wand.api"].library = types.SimpleNamespace(
            MagickMotionBlurImage=types.SimpleNamespace()
        )
        modules["wand.image"].Image = _MissingImage
    if not _can_import("skimage.filters", _SKIMAGE):
        modules |= {name: types.ModuleType(name) for name in _SKIMAGE}
        modules["skimage.filters"].gaussian = _missing_gaussian
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


class _MissingImage:
    """Replaces Wand's class of images, from which LIBERO-plus derives its own."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        raise EnvError(
            "this task adds motion blur to its pictures, for which LIBERO-plus needs ImageMagick; "
            "run `pip install Wand` and `apt-get install libmagickwand-dev`, or leave out tasks "
            "with a noise from 1 to 10."
        )


def _missing_gaussian(*_arguments: object, **_keywords: object) -> NoReturn:
    raise EnvError(
        "this task blurs its pictures, for which LIBERO-plus needs scikit-image; run `pip install "
        "scikit-image`, or leave out tasks with a noise from 11 to 20 or from 41 to 50."
    )


def _can_import(module: str, family: tuple[str, ...]) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:  # not installed, or Wand without ImageMagick's library
        for name in family:
            sys.modules.pop(name, None)
        return False
    return True
