"""Packages import their names on first use, and know those that were renamed."""

import sys
from pathlib import Path

import pytest

from vla_rl.lazy_names import lazy_names


@pytest.fixture
def package(import_folder: Path) -> str:
    folder = import_folder / "lazily"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from vla_rl.lazy_names import lazy_names\n"
        "__getattr__, __dir__ = lazy_names(__name__, {'heavy': ('weight', 'size'), 'deep.down': ('depth',)})"
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


def test_a_name_that_is_not_listed_is_no_attribute(package: str) -> None:
    import lazily

    for name in ("other", "unknown"):
        with pytest.raises(AttributeError, match=f"module 'lazily' has no attribute '{name}'"):
            getattr(lazily, name)
    with pytest.raises(ImportError, match="cannot import name 'unknown'"):
        from lazily import unknown  # noqa: F401


def test_a_renamed_name_is_found_with_a_warning() -> None:
    from vla_rl.actors import actor_method

    find, _ = lazy_names("vla_rl.actors", {})
    with pytest.warns(DeprecationWarning, match="actor_method"):
        assert find("endpoint") is actor_method
