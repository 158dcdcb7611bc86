"""What an environment shows and what it says beside it: plain values that any environment and any policy can speak.

An observation is whatever the environment's gymnasium space describes; embodied environments use a flat dict:

    image, wrist_image, ...   uint8 [H, W, 3], RGB, upright as a person would hold the picture
    state, ...                float32 [D], proprioception; the environment's docstring gives units and frames
    instruction               str, the task in words
"""

from typing import Any, TypeAlias

Observation: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of NumPy arrays, numbers and strings."""

Info: TypeAlias = dict[str, Any]
"""Gymnasium's info, of the same plain values. `info["is_success"]` is a bool where the task knows success."""
