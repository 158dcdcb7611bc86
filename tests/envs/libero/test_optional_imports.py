"""Modules that LIBERO-plus imports and most of its tasks never use may be missing."""

import importlib
import sys

import pytest

from vla_rl.envs.libero.loading import without_optional_modules
from vla_rl.errors import EnvError

FAMILIES = ("gym", "wand", "wand.api", "wand.image", "skimage", "skimage.filters")


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.import_module

    def refused(name: str, package: str | None = None) -> object:
        if name.split(".")[0] in ("wand", "skimage"):
            raise ImportError(name)
        return found(name, package)

    for name in FAMILIES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib, "import_module", refused)


@pytest.mark.usefixtures("none_installed")
def test_imports_succeed_inside_and_nothing_is_left_of_them() -> None:
    with without_optional_modules():
        from gym import Env  # noqa: F401
        from skimage.filters import gaussian  # noqa: F401
        from wand.api import library

        library.MagickMotionBlurImage.argtypes = ()  # as LIBERO-plus sets it
    assert not set(FAMILIES) & set(sys.modules)


@pytest.mark.usefixtures("none_installed")
def test_a_task_that_uses_one_is_told_what_to_install() -> None:
    with without_optional_modules():
        from skimage.filters import gaussian
        from wand.image import Image
    with pytest.raises(EnvError, match=r"motion blur .* `pip install Wand`"):
        Image(blob=b"")
    with pytest.raises(EnvError, match="needs scikit-image"):
        gaussian(None)
