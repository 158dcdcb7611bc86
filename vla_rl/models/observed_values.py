"""Values that policies read from an observation, refused with one error if they are of another kind."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from vla_rl.types import Observation

MOST_REACHES: Final = 5.0
"""Half-ranges of the statistics; data of which half are further from the middle are in other units."""

OTHER_UNITS: Final = (
    "other units, another order of the numbers, or offsets instead of positions; convert the data, or use "
    "the statistics of this data (--statistics data)."
)
"""Cause and remedy of numbers that are far outside of the statistics."""


def require_dicts(observations: Iterable[Any]) -> None:
    """Raise ValueError for an observation that is no dict, as of an environment that shows one array."""
    for observation in observations:
        if not isinstance(observation, Mapping):
            raise ValueError(
                f"the observation is {describe_array(observation)}, expected a dict of arrays and texts by name; "
                "an environment that shows one array needs a Dict space, and an agent gives the policy all of it."
            )


def require_instruction(observation: Observation) -> str:
    """Return the task in words. Raises: ValueError if it is no text."""
    instruction = observation.get("instruction")
    if not isinstance(instruction, str):
        raise ValueError(
            f"observation['instruction'] is {describe_array(instruction)}, expected the task in words "
            f"(str); the observation's keys are {sorted(observation)}."
        )
    return instruction


def require_frame(observation: Observation, key: str, advice: str) -> np.ndarray:
    """Return an image, uint8 [H, W, 3].

    Args:
        observation: what an environment showed.
        key: the camera's.
        advice: sentence about how to name another key.

    Raises: ValueError if it is no such image.
    """
    frame = observation.get(key)
    if (
        isinstance(frame, np.ndarray)
        and frame.dtype == np.uint8
        and frame.ndim == 3
        and frame.shape[2] == 3
        and frame.size
    ):
        return frame
    raise ValueError(
        f"observation[{key!r}] is {describe_array(frame)}, expected uint8 [H, W, 3] (RGB, channels last); "
        f"the observation's keys are {sorted(observation)}. {advice}"
    )


def find_other_units(low: np.ndarray, high: np.ndarray, data: np.ndarray) -> int | None:
    """Return the first number of which most data are far outside of what the statistics scale; None if all fit.

    Degrees instead of radians, offsets instead of positions, or another order of the numbers, would be learnt
    without an error, many deviations away, or clipped to one value.

    Args:
        low: [D], least value by the statistics; a number that is constant in them is not looked at.
        high: [D], greatest value.
        data: [N, D].
    """
    middle, reach = (low + high) / 2, (high - low) / 2
    distance = np.median(np.abs(np.asarray(data, np.float64) - middle), axis=0)
    outside = np.flatnonzero((reach > 0.0) & (distance > MOST_REACHES * reach))
    return int(outside[0]) if len(outside) else None


def describe_array(value: Any) -> str:
    """Return the dtype and shape of an array, and the type of anything else."""
    return (
        f"{value.dtype} {list(value.shape)}"
        if isinstance(value, np.ndarray)
        else type(value).__name__
    )
