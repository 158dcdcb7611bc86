"""Action bounds from a checkpoint's statistics: `dataset_statistics.json`, else `config.json`.

A set that both files of one folder have must be the same in both. Those beside an adapter take
precedence over those of its base.

A wrong set of statistics silently costs tens of points of success rate, so no key is guessed: it
has to be given unless there is only one set.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.action_tokens import ActionBounds, Gripper
from vla_rl.models.prismatic.config import ConstantProprio, Normalization, ProprioConfig
from vla_rl.models.prismatic.public_config import Extension
from vla_rl.util.values import compare_sources

STATISTICS_FILE: Final = "dataset_statistics.json"
NO_NOOPS: Final = "_no_noops"
"""Suffix of the statistics of LIBERO's data without idle steps; `libero_goal` finds the set with or
without it."""


class Range(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Statistics of one vector; unused fields are not read.

    Example:
        Range(q01=(-0.75, -0.66), q99=(0.94, 0.88), mask=(True, True))
    """

    q01: tuple[float, ...] | None = None
    q99: tuple[float, ...] | None = None
    min: tuple[float, ...] | None = None
    max: tuple[float, ...] | None = None
    mask: tuple[bool, ...] | None = None


class Statistics(msgspec.Struct, kw_only=True):
    """Statistics of one training set.

    Example:
        Statistics(action=Range(q01=(-0.75, -0.66), q99=(0.94, 0.88), mask=(True, False)))
    """

    action: Range
    proprio: Range | None = None


class StatisticsSets(Mapping[str, Statistics]):
    """Sets of statistics by key.

    A set that two files of one folder state differently is listed, and reading it is an error:
    other sets can be used.

    Args:
        sets: all sets.
        doubtful: sets that a second file has, with the names of both files.
    """

    def __init__(
        self,
        sets: Mapping[str, Statistics],
        doubtful: Mapping[str, tuple[Statistics, str, str]] = MappingProxyType({}),
    ) -> None:
        self._sets, self._doubtful = dict(sets), doubtful

    def with_set(self, key: str, statistics: Statistics) -> "StatisticsSets":
        """Return the same sets and another one, which replaces that of its name."""
        doubtful = {name: each for name, each in self._doubtful.items() if name != key}
        return StatisticsSets({**self._sets, key: statistics}, doubtful)

    def __getitem__(self, key: str) -> Statistics:
        found = self._sets[key]
        # An error at use and not at load: other sets of the file may be fine, and config.json
        # holds those of all of Open X-Embodiment.
        if key in self._doubtful:
            other, file, other_file = self._doubtful[key]
            _require_agreement(key, (file, found), (other_file, other))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._sets)

    def __len__(self) -> int:
        return len(self._sets)


def read_statistics(
    folders: Sequence[Path], in_config: Mapping[str, Any], config: Path | None = None
) -> StatisticsSets:
    """Read all sets of a checkpoint by key: an earlier folder takes precedence over a later one,
    and all over the config.

    Args:
        folders: the checkpoint's folders.
        in_config: sets in its configuration.
        config: the configuration's file; a set that the same folder's statistics have too must be
            the same.

    Raises: CheckpointError for a file that holds something else.
    """
    found = dict(in_config)
    twice: dict[str, tuple[str, str]] = {}
    for path in (folder / STATISTICS_FILE for folder in reversed(folders)):
        try:
            held = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
            if config is not None and path.parent == config.parent:
                twice = {key: (str(path), str(config)) for key in held if key in in_config}
            else:
                twice = {key: files for key, files in twice.items() if key not in held}
            found |= held
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read as action statistics: {error}") from error
    try:
        sets = msgspec.convert(found, dict[str, Statistics])
        others = msgspec.convert({key: in_config[key] for key in twice}, dict[str, Statistics])
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"the action statistics of {folders[0]} are not as expected: {error}"
        ) from error
    return StatisticsSets(sets, {key: (others[key], *files) for key, files in twice.items()})


def _require_agreement(
    key: str, first: tuple[str, Statistics], second: tuple[str, Statistics]
) -> None:
    """Raise CheckpointError if both state a number differently, beyond float32's rounding."""
    for vector in ("action", "proprio"):
        one, other = (getattr(statistics, vector) for _, statistics in (first, second))
        for field in Range.__struct_fields__:
            values = [getattr(each, field, None) for each in (one, other)]
            if None in values:
                continue
            # One of the files was written from float32, so equal statistics differ in the last
            # digits.
            rounded = [np.asarray(each, np.float32).tolist() for each in values]
            compare_sources(
                f"{field} of {vector} in the statistics {key!r}",
                (first[0], rounded[0]),
                (second[0], rounded[1]),
                remedy=f"remove {key!r} from the file that the policy was not trained with",
            )


def choose_key(statistics: Mapping[str, Statistics], asked: str | None, folder: Path) -> str:
    """Return the key to use. Raises: CheckpointError listing the existing keys."""
    if asked is None and len(statistics) == 1:
        return next(iter(statistics))
    # OpenVLA's checkpoints say libero_goal, OpenVLA-OFT's libero_goal_no_noops, for the same
    # suite.
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


def get_action_bounds(
    statistics: Statistics, normalization: Normalization, *, gripper: Gripper, epsilon: float
) -> ActionBounds:
    """Return the bounds of the action tokens.

    Raises: CheckpointError if the requested statistics do not exist, or are constant in all scaled numbers.
    """
    low, high = _get_range(statistics.action, normalization, "action")
    # Statistics without a mask scale every number, as in ALOHA's.
    mask = statistics.action.mask or (True,) * len(low)
    ends = [pair for *pair, is_scaled in zip(low, high, mask, strict=False) if is_scaled]
    if ends and all(first == last for first, last in ends):
        raise CheckpointError(
            f"the action statistics are constant in all {len(ends)} scaled numbers, expected a range in some: every "
            "action would be the same; copy the statistics of the policy's training data."
        )
    return ActionBounds(low=low, high=high, is_scaled=mask, gripper=gripper, epsilon=epsilon)


def get_gripper(statistics: Statistics, extension: Extension) -> Gripper:
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
    # Only the gripper is left unscaled by OpenVLA's convention; any other mask is the robot's
    # own.
    *others, last = mask
    return "openvla" if all(others) and not last else "signed"


def get_proprio(
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
    low, high = _get_range(statistics.proprio, normalization, "proprio")
    return ProprioConfig(key=key, low=low, high=high, constant=constant)


def get_constant_proprio(extension: Extension) -> ConstantProprio:
    """Return a checkpoint's scaling of constant dimensions; the default is that of the public
    checkpoints' evaluation.

    A folder that was saved here before the setting existed scaled them to 0.
    """
    if extension.proprio_constant is not None:
        return extension.proprio_constant
    return "ends" if extension.family is None else "zero"


def _get_range(
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
