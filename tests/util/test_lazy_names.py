"""Packages import their names on first use."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def package(import_folder: Path) -> str:
    folder = import_folder / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from vla_rl.util.lazy_names import lazy_names\n"
        "from os.path import join as join\n"
        "if TYPE_CHECKING:\n"
        "    from lazily.heavy import weight as weight, size as size\n"
        "    from lazily.deep.down import depth as depth\n"
        "__getattr__, __dir__ = lazy_names(__name__)"
    )
    (folder / "heavy.py").write_text("weight, size, other = 7, 8, 9")
    (folder / "deep").mkdir()
    (folder / "deep/down.py").write_text("depth = 3")
    return "lazily"


def test_a_name_is_imported_once_it_is_used(package: str) -> None:
    import lazily  # type: ignore[import-not-found]

    assert {"weight", "size", "depth", "lazy_names"} <= set(dir(lazily))
    assert "lazily.heavy" not in sys.modules
    from lazily import size

    assert (lazily.weight, size, lazily.depth) == (7, 8, 3)
    assert {"weight", "size", "depth"} <= set(vars(lazily))  # looked up once
    assert lazily.__all__ == ["depth", "join", "size", "weight"]


def test_a_name_that_is_not_listed_is_no_attribute(package: str) -> None:
    import lazily

    for name in ("other", "unknown"):
        with pytest.raises(AttributeError, match=f"module 'lazily' has no attribute '{name}'"):
            getattr(lazily, name)
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        from lazily import unknown  # noqa: F401
