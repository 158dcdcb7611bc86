"""Checks of a flow policy's folder against a robot and against its data.

widths       the action and state of the environment, or of the data set, have the folder's widths
padding      no row beyond the robot's action is taken for a part of it
gripper      the last number has the range and the sign of the data's
units        the data are inside of what the statistics scale, number by number
"""

import logging
from typing import Final

import numpy as np

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.folder_settings import FolderSettings
from vla_rl.models.flow.normalization import FIELDS, NormalizationKind, Normalizer
from vla_rl.models.observed_values import OTHER_UNITS, find_other_units

NEAR: Final = 0.25
"""Share of the data's range by which both ends of the statistics may differ from the data's."""

_log = logging.getLogger(__name__)


def check_widths(settings: FolderSettings, action_dim: int, state_dim: int | None) -> None:
    """Compare the widths of a robot with the folder's.

    Args:
        settings: the folder's.
        action_dim: numbers of the robot's action.
        state_dim: numbers of its state; None if it is not known.

    Raises: CheckpointError naming both widths.
    """
    if settings.action_dim > action_dim:
        padded = settings.action_dim == settings.padded_dim
        raise CheckpointError(
            f"the policy's action has {settings.action_dim} numbers, expected the robot's {action_dim}"
            + (
                f": {settings.padded_dim} is the padded width, so the numbers beyond the robot's were "
                "never masked; state the robot's width in the folder (output_features), and statistics "
                "of that width."
                if padded
                else "; the numbers beyond it would never be masked. The policy is of another robot."
            )
        )
    if settings.action_dim < action_dim:
        raise CheckpointError(
            f"the policy's action has {settings.action_dim} numbers, expected the robot's {action_dim}; "
            "the policy is of another robot."
        )
    if state_dim is not None and settings.state_dim != state_dim:
        raise CheckpointError(
            f"the policy's state has {settings.state_dim} numbers, but the robot's has {state_dim}; the "
            "policy is of another robot, or the environment gives another state."
        )


def check_gripper(settings: FolderSettings, actions: np.ndarray | None) -> None:
    """Compare the range and the sign of the last number, the gripper, with the data's.

    Args:
        settings: the folder's.
        actions: [N, D] in the environment's units; None if there are none: then one line says that
            nothing was checked.

    Raises: CheckpointError naming both ranges.
    """
    found = _gripper_range(settings)
    if actions is None or found is None or not len(actions):
        _log.warning("the gripper's range and sign were not checked: %s", _reason(actions, found))
        return
    data = np.asarray(actions, np.float64)[:, -1]
    own = _data_ends(settings.action.kind, data)
    room = NEAR * max(own[1] - own[0], 1e-6)
    if all(abs(one - other) <= room for one, other in zip(found, own, strict=True)):
        return
    mirrored = (-found[1], -found[0])
    is_mirrored = all(abs(one - other) <= room for one, other in zip(mirrored, own, strict=True))
    raise CheckpointError(
        f"the policy's statistics have the gripper from {found[0]:.3g} to {found[1]:.3g}, but the data "
        f"from {own[0]:.3g} to {own[1]:.3g}"
        + (": its sign is the opposite one" if is_mirrored else ": its range is another one")
        + "; convert the data's last number, or use the statistics of this data (--statistics data)."
    )


def check_units(name: str, normalizer: Normalizer, data: np.ndarray) -> None:
    """Compare every number of the statistics with the data.

    Args:
        name: what the numbers are, in the error.
        normalizer: the folder's.
        data: [N, D] in the environment's units.

    Raises: CheckpointError naming the first number that is in other units (`find_other_units`).
    """
    if normalizer.kind == "IDENTITY" or not len(data):
        return
    ends = np.array([_ends(normalizer, number) for number in range(data.shape[1])])
    number = find_other_units(ends[:, 0], ends[:, 1], data)
    if number is not None:
        own = _data_ends(normalizer.kind, data[:, number])
        raise CheckpointError(
            f"the policy's statistics have number {number} of the {name} from {ends[number, 0]:.3g} to "
            f"{ends[number, 1]:.3g}, but the data from {own[0]:.3g} to {own[1]:.3g}: {OTHER_UNITS}"
        )


def _reason(actions: np.ndarray | None, found: tuple[float, float] | None) -> str:
    if found is None:
        return "the folder's actions are not normalised"
    return "there is no data to compare with" if actions is None else "the data has no actions"


def _gripper_range(settings: FolderSettings) -> tuple[float, float] | None:
    """Return both ends of the gripper by the folder's statistics; None without any."""
    action = settings.action
    return None if action.kind == "IDENTITY" else _ends(action, settings.action_dim - 1)


def _ends(normalizer: Normalizer, number: int) -> tuple[float, float]:
    """Return both ends of a number by the statistics that its kind reads."""
    first, second = (float(normalizer.statistics[name][number]) for name in FIELDS[normalizer.kind])
    return (first - second, first + second) if normalizer.kind == "MEAN_STD" else (first, second)


def _data_ends(kind: NormalizationKind, data: np.ndarray) -> tuple[float, float]:
    """Return the same ends of data [N]."""
    if kind == "MEAN_STD":
        return float(data.mean() - data.std()), float(data.mean() + data.std())
    if kind == "MIN_MAX":
        return float(data.min()), float(data.max())
    low = 0.01 if kind == "QUANTILES" else 0.1
    return float(np.quantile(data, low)), float(np.quantile(data, 1 - low))
