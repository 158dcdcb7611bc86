"""Action bounds from a checkpoint's statistics: `dataset_statistics.json` takes precedence over
`config.json`.

A wrong set of statistics silently costs tens of points of success rate, so no key is guessed: it
has to be given unless there is only one set.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.action_tokens import ActionBounds, Gripper
from vla_rl.models.prismatic.config import ConstantProprio, Normalization, ProprioConfig
from vla_rl.models.prismatic.public_config import Extension

STATISTICS_FILE: Final = "dataset_statistics.json"
NO_NOOPS: Final = "_no_noops"
"""Suffix of the statistics of LIBERO's data without idle steps; `libero_goal` finds the set with or
without it."""


class Range(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Statistics of one vector; unused fields are not read."""

    q01: tuple[float, ...] | None = None
    q99: tuple[float, ...] | None = None
    min: tuple[float, ...] | None = None
    max: tuple[float, ...] | None = None
    mask: tuple[bool, ...] | None = None


class Statistics(msgspec.Struct, kw_only=True):
    """Statistics of one training set."""

    action: Range
    proprio: Range | None = None


def read_statistics(folders: Sequence[Path], in_config: Mapping[str, Any]) -> dict[str, Statistics]:
    """Read all sets of a checkpoint by key: an earlier folder takes precedence over a later one,
    and all over the config.

    Raises: CheckpointError for a file that holds something else.
    """
    found = dict(in_config)
    for path in (folder / STATISTICS_FILE for folder in reversed(folders)):
        try:
            found |= msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as action statistics: {error}") from error
    try:
        return msgspec.convert(found, dict[str, Statistics])
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"the action statistics of {folders[0]} are not as expected: {error}"
        ) from error


def choose_key(statistics: Mapping[str, Statistics], asked: str | None, folder: Path) -> str:
    """Return the key to use. Raises: CheckpointError listing the existing keys."""
    if asked is None and len(statistics) == 1:
        return next(iter(statistics))
    for key in () if asked is None else (asked, asked + NO_NOOPS):
        if key in statistics:
            return key
    wanted = (
        f"no {asked!r}"
        if asked is not None
        else "more than one set, and none was chosen (norm_key, --norm-key)"
    )
    raise CheckpointError(
        f"{folder} has action statistics with {wanted}; it has {sorted(statistics)}."
    )


def bounds_of(
    statistics: Statistics, normalization: Normalization, *, gripper: Gripper, epsilon: float
) -> ActionBounds:
    """Return the bounds of the action tokens.

    Raises: CheckpointError if the requested statistics do not exist.
    """
    low, high = _ends(statistics.action, normalization, "action")
    mask = statistics.action.mask or (True,) * len(low)
    return ActionBounds(low=low, high=high, is_scaled=mask, gripper=gripper, epsilon=epsilon)


def gripper_of(statistics: Statistics, extension: Extension) -> Gripper:
    """Return the meaning of an action's last number: the checkpoint's own setting, else inferred
    from its statistics' mask.

    OpenVLA's convention, 0 = close and 1 = open, holds if the gripper is the only number that is
    not scaled. Statistics that scale every number, such as ALOHA's joint positions, are in the
    environment's own units; without a mask it cannot be inferred.
    """
    if extension.gripper is not None:
        return extension.gripper
    mask = statistics.action.mask
    if extension.family is not None or mask is None:
        return "openvla"
    *others, last = mask
    return "openvla" if all(others) and not last else "signed"


def proprio_of(
    statistics: Statistics, normalization: Normalization, key: str, constant: ConstantProprio
) -> ProprioConfig | None:
    """Return proprioception's scaling; None without statistics.

    Raises: CheckpointError if a dimension is not scaled.
    """
    if statistics.proprio is None:
        return None
    if not all(statistics.proprio.mask or ()):
        raise CheckpointError(
            f"the proprio statistics have the mask {statistics.proprio.mask}; expected one that "
            "scales every dimension."
        )
    low, high = _ends(statistics.proprio, normalization, "proprio")
    return ProprioConfig(key=key, low=low, high=high, constant=constant)


def constant_proprio_of(extension: Extension) -> ConstantProprio:
    """Return a checkpoint's scaling of constant dimensions; the default is that of the public
    checkpoints' evaluation.

    A folder that was saved here before the setting existed scaled them to 0.
    """
    if extension.proprio_constant is not None:
        return extension.proprio_constant
    return "ends" if extension.family is None else "zero"


def _ends(
    ends: Range, normalization: Normalization, name: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    names = ("q01", "q99") if normalization == "bounds_q99" else ("min", "max")
    low, high = (getattr(ends, field) for field in names)
    if not low or not high or len(low) != len(high):
        raise CheckpointError(
            f"the {name} statistics have no {names[0]} and {names[1]} of one length, which "
            f"{normalization} needs."
        )
    return low, high
