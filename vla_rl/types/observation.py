"""Observations: plain values that all environments or policies can exchange.

An observation has the form of the environment's gymnasium space; embodied environments use a flat
dict:

    image, wrist_image, ...   uint8 [H, W, 3], RGB, upright
    state, ...                float32 [D], proprioception; the environment's docstring gives units, frames
    instruction               str, the task in words

A conversation is observed as `prompt_tokens`, int64 [P]; one with images also as `image_0`, `image_1`,
... in their order, with `image_starts`, int64 [n]: the index of each image's first token.

An array may lie in memory of another process, an image cache:

    observation["image"]   np.ndarray      it is in this process
                           ArrayRef        it is in the image cache of the host that will read it

A process of that host reads it by its path. The memory ends with the process that holds it.

A learner that scores a decision adds what the policy drew for it as `drawn`, a dict of arrays (`with_drawn`). A robot
that moves while a flow policy decides adds the rest of its plan (`with_plan`).
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from vla_rl.util.arrays import parse_dtype

Observation: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of NumPy arrays, numbers and strings."""

Info: TypeAlias = dict[str, Any]
"""Gymnasium's info, of the same plain values. `info["is_success"]` is a bool if the task can report
success."""


def make_conversation_observation(
    prompt_tokens: np.ndarray,
    images: Sequence[np.ndarray] = (),
    image_starts: Sequence[int] | np.ndarray = (),
) -> Observation:
    """Return a conversation as an observation."""
    seen: Observation = {"prompt_tokens": prompt_tokens}
    # No keys without images: a text environment's observations must stay as they were recorded.
    if images:
        seen |= {f"image_{number}": image for number, image in enumerate(images)}
        seen["image_starts"] = np.array(image_starts, np.int64)
    return seen


def get_images(observation: Observation) -> tuple[np.ndarray, ...]:
    """Return the images of an observed conversation, in their order."""
    if "image_starts" not in observation:
        return ()
    return tuple(
        observation[f"image_{number}"] for number in range(len(observation["image_starts"]))
    )


DRAWN_KEY: Final = "drawn"
"""Key under which a policy that scores a decision finds `ActionChunk.drawn`."""


def with_drawn(observation: Observation, drawn: Mapping[str, Any] | None) -> Observation:
    """Return what a policy is given to score a decision: the observation, and what was drawn for it.

    Args:
        observation: what the policy saw; returned as it is if `drawn` is None.
        drawn: `ActionChunk.drawn`.

    Raises: ValueError if the environment has an observation of that key.
    """
    if drawn is None:
        return observation
    if DRAWN_KEY in observation:
        raise ValueError(
            f"the environment's observation has the key {DRAWN_KEY!r}, which is kept for what the policy "
            "drew; rename it in the environment"
        )
    return {**observation, DRAWN_KEY: dict(drawn)}


PLANNED_KEY: Final = "planned_actions"
"""Key of the rows of the previous chunk that a robot has not run yet, float32 [R, D], from now on."""

DELAY_KEY: Final = "delay"
"""Key of the number of these rows that run while the policy decides."""


def with_plan(observation: Observation, planned: np.ndarray, delay: int) -> Observation:
    """Return what a flow policy is given to continue a plan.

    Args:
        observation: what the robot sees now.
        planned: float32 [R, D], the rows of the previous chunk from now on, in the environment's units.
        delay: control steps that pass while the policy decides, at most R.

    Raises: ValueError if the environment has an observation of one of the keys.
    """
    for key in (PLANNED_KEY, DELAY_KEY):
        if key in observation:
            raise ValueError(
                f"the environment's observation has the key {key!r}, which is kept for a robot's plan; rename "
                "it in the environment"
            )
    return {**observation, PLANNED_KEY: planned, DELAY_KEY: delay}


KEY_BYTES: Final = 8
"""Bytes at the beginning of each memory, which say whose arrays it has."""


class ArrayRef(msgspec.Struct, frozen=True, array_like=True):
    """An array in memory of another process; in an observation it stands for that array.

    Example:
        ArrayRef("gpu2", "/proc/812/fd/9", key=31, start=8, dtype="|u1", shape=(224, 224, 3))
    """

    host: str
    """Name of the host that has it; empty for the one that controls the run."""

    path: str
    """Path of the memory there."""

    key: int
    """Key of the memory. A path is used again after its memory was dropped."""

    # The key before the arrays: a reader that comes late finds that the memory is another one.
    start: int
    """Place of its first byte."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * parse_dtype(self.dtype).itemsize

    def read_array(self) -> np.ndarray:
        """Copy the array, on its host. Raises: OSError if the memory is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"the images at {self.path} are gone: the process that held them has ended, or has "
                "dropped them"
            ) from None
        try:
            key, num_read = int.from_bytes(os.pread(descriptor, KEY_BYTES, 0), "little"), 0
            # looked up before any memory is taken: the size is what another process has said
            if self.start + self.num_bytes <= os.fstat(descriptor).st_size:
                array = np.empty(self.shape, parse_dtype(self.dtype))
                content = array.reshape(-1).view(np.uint8).data
                num_read = os.preadv(descriptor, [content], self.start)
        finally:
            os.close(descriptor)
        # The path may have been used again meanwhile: the images of another episode would look plausible.
        if key != self.key or num_read != self.num_bytes:
            raise OSError(
                f"{self.path} has {num_read} bytes of {key} at {self.start}, expected "
                f"{self.num_bytes} of {self.key}: the process that held them has dropped them"
            )
        return array


class ImageCacheRef(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a trajectory's large observations on the host whose ranks will read them.

    Example:
        ImageCacheRef(host="gpu2", key=31, num_bytes=4_515_840)   # 30 images of 224 x 224
    """

    host: str
    """Name of the host, as in `ArrayRef`."""

    key: int
    num_bytes: int
