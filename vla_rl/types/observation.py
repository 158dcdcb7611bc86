"""Observations and infos: plain values that all environments and policies can exchange.

An observation has the form of the environment's gymnasium space; embodied environments use a flat
dict:

    image, wrist_image, ...   uint8 [H, W, 3], RGB, upright
    state, ...                float32 [D], proprioception; the environment's docstring gives units and frames
    instruction               str, the task in words
"""

from typing import Any, TypeAlias

Observation: TypeAlias = dict[str, Any]
"""Nested dicts, lists and tuples of NumPy arrays, numbers and strings."""

Info: TypeAlias = dict[str, Any]
"""Gymnasium's info, of the same plain values. `info["is_success"]` is a bool if the task can report
success."""
