"""Variants of LIBERO tasks, parsed from the names in LIBERO-plus and LIBERO-PRO.

LIBERO-plus has its variants in LIBERO's suites and appends to the name of the original task:

    ..._view_15_0_100_0_0_initstate_0             another place of the camera
    ..._view_0_0_100_0_0_initstate_7              another pose of the robot's joints
    ..._view_0_0_100_0_0_initstate_0_noise_3      noise in the fixed camera's picture
    ..._language_4_view_0_0_100_0_0_initstate_0   another instruction
    ..._light_2, ..._table_1, ..._tb_1            another light; other textures (two kinds)
    ..._add_10, ..._level1_sample3                more objects; objects elsewhere

LIBERO-PRO makes a suite of each change, and appends to the suite's name: `libero_goal_swap`.
"""

import re
from pathlib import PurePosixPath
from typing import Final

import msgspec

UNCHANGED: Final = ""
"""The kind of change of LIBERO's own tasks."""

_SAME_VIEW: Final = "0_0_100_0_0"
_BY_NAME_ALONE: Final = re.compile(
    r"(?P<goal>(?P<origin>.+?)(?P<language>_language_\d+)?)"
    r"_view_(?P<view>\d+(?:_\d+){4})_initstate_(?P<joints>\d+)(?:_noise_(?P<noise>\d+))?"
)
_BY_GOAL_FILE: Final = re.compile(
    r"(?P<origin>.+?)_(?:(?P<tag>table|tb|light|language|add)_\d+|(?:moved_)?level\d+_sample\d+)"
)
_KIND_OF_TAG: Final = {
    "table": "background",
    "tb": "background",
    "light": "light",
    "language": "language",
    "add": "layout",
}
_KIND_OF_SUFFIX: Final = {"lan": "language"}
_WITH_STATES_OF_ITS_OWN: Final = "layout"
_FOLDER_OF_THOSE_STATES: Final = "libero_newobj"


class Variant(msgspec.Struct, frozen=True):
    """A task as its name describes it."""

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
    """Number of the noise in the fixed camera's picture, in LIBERO-plus's numbering; 0 for none."""


def variant_of(suite: str, name: str) -> Variant:
    """Parse the name of a task. `suite` is without its package."""
    if match := _BY_NAME_ALONE.fullmatch(name):
        changed = {
            "noise": match["noise"] is not None,
            "language": match["language"] is not None,
            "camera": match["view"] != _SAME_VIEW,
            "robot": int(match["joints"]) != 0,
        }
        kind = "+".join(kind for kind, is_changed in changed.items() if is_changed)
        states = PurePosixPath(suite, match["origin"])
        return Variant(match["origin"], kind, match["goal"], states, int(match["noise"] or 0))
    if match := _BY_GOAL_FILE.fullmatch(name):
        kind = _KIND_OF_TAG.get(match["tag"], "layout")
        has_own = kind == _WITH_STATES_OF_ITS_OWN
        states = (
            PurePosixPath(_FOLDER_OF_THOSE_STATES, suite, name)
            if has_own
            else PurePosixPath(suite, match["origin"])
        )
        return Variant(match["origin"], kind, name, states)
    return Variant(name, UNCHANGED, name, PurePosixPath(suite, name))


def kind_of_suite(suite: str, origin: str | None) -> str:
    """Return LIBERO-PRO's change to all tasks of a suite that was made from the suite `origin`:
    `swap`, `with_mug`.
    """
    if origin is None or suite == origin:
        return UNCHANGED
    suffix = suite.removeprefix(f"{origin}_")
    return _KIND_OF_SUFFIX.get(suffix, suffix)
