"""Observations and infos: plain values that all environments and policies can exchange.

An observation has the form of the environment's gymnasium space; embodied environments use a flat
dict:

    image, wrist_image, ...   uint8 [H, W, 3], RGB, upright
    state, ...                float32 [D], proprioception; the environment's docstring gives units and frames
    instruction               str, the task in words

A conversation is observed as `prompt_tokens`, int64 [P]; one with images also as `image_0`, `image_1`,
... in their order, and `image_starts`, int64 [n]: the place of each image's first token.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Observation: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of NumPy arrays, numbers and strings."""

Info: TypeAlias = dict[str, Any]
"""Gymnasium's info, of the same plain values. `info["is_success"]` is a bool if the task can report
success."""


def observed_conversation(
    prompt_tokens: np.ndarray,
    images: Sequence[np.ndarray] = (),
    image_starts: Sequence[int] | np.ndarray = (),
) -> Observation:
    """Return a conversation as an observation."""
    seen: Observation = {"prompt_tokens": prompt_tokens}
    if images:
        seen |= {f"image_{number}": image for number, image in enumerate(images)}
        seen["image_starts"] = np.array(image_starts, np.int64)
    return seen


def images_of(observation: Observation) -> tuple[np.ndarray, ...]:
    """Return the images of an observed conversation, in their order."""
    if "image_starts" not in observation:
        return ()
    return tuple(
        observation[f"image_{number}"] for number in range(len(observation["image_starts"]))
    )
