"""Suites of LIBERO and of the packages that extend it, by name."""

import pytest

from vla_rl.envs.libero import packages
from vla_rl.envs.libero.packages import (
    find_package_root,
    get_package_command,
    join_suite,
    list_installed_packages,
    split_suite,
)


@pytest.mark.parametrize(
    ("suite", "package", "name"),
    [
        ("libero_goal", "libero", "libero_goal"),
        ("liberopro.libero_goal_swap", "liberopro", "libero_goal_swap"),
        ("liberoplus.libero_10", "liberoplus", "libero_10"),
        ("mine.libero_goal", "libero", "mine.libero_goal"),  # no package: the name has a dot
    ],
)
def test_a_suite_is_split_into_package_and_name_and_joined_again(
    suite: str, package: str, name: str
) -> None:
    assert split_suite(suite) == (package, name)
    assert join_suite(package, name) == suite


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda _: None)
    find_package_root.cache_clear()
    try:
        assert list_installed_packages() == ()
        with pytest.raises(ImportError, match=r"^LIBERO is not installed; run `pip install "):
            find_package_root("libero")
        with pytest.raises(ImportError, match=r"package liberoplus is not.*--no-deps.*liberoplus"):
            find_package_root("liberoplus")
    finally:
        find_package_root.cache_clear()


def test_every_package_has_a_command() -> None:
    for package in packages.PACKAGES:
        assert get_package_command(package).startswith("pip install ")
