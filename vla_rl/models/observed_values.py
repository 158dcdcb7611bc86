"""Values that policies read from an observation, refused with one error if they are of another kind."""

from typing import Any

import numpy as np

from vla_rl.types import Observation


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


def describe_array(value: Any) -> str:
    """Return the dtype and shape of an array, and the type of anything else."""
    return (
        f"{value.dtype} {list(value.shape)}"
        if isinstance(value, np.ndarray)
        else type(value).__name__
    )
