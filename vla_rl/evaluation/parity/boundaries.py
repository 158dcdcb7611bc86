"""The boundaries of an episode: values that pass between the stages of a control loop, in order.

A value depends only on those before it, so the first boundary at which two loops differ names the
stage to look at.
"""

from typing import Final

import msgspec


class Boundary(msgspec.Struct, frozen=True):
    """One kind of value that two loops can be compared by."""

    name: str
    """Name in a trace."""

    meaning: str
    """Contents, with type, shape and unit."""

    tolerance: float
    """Largest difference of two numbers that counts as equal; 0 for bytes and ids."""

    suspects: str
    """Usual reasons for a difference that first appears here."""


BOUNDARIES: Final = (
    Boundary(
        "instruction",
        "the task in words, str",
        0.0,
        "the suite, the task number, or the BDDL file's text instead of the file name's",
    ),
    Boundary(
        "camera",
        "a picture as the simulator draws it, uint8 [H, W, 3], RGB, OpenGL's rows (bottom first)",
        0.0,
        "the initial state, the fixtures' scene seed, settle steps, assets, renderer, picture size",
    ),
    Boundary(
        "orientation",
        "the picture as the policy's preprocessing gets it, uint8 [H, W, 3]",
        0.0,
        "a rotation or mirroring that one loop lacks; OpenVLA's data are turned by 180 degrees",
    ),
    Boundary(
        "jpeg",
        "the picture after encoding and decoding, uint8 [H, W, 3]",
        0.0,
        "another JPEG decoder, quality or chroma subsampling",
    ),
    Boundary(
        "resize",
        "the picture in the network's size, uint8 [S, S, 3]",
        0.0,
        "another kernel (lanczos3, bicubic), antialiasing, or rounding",
    ),
    Boundary(
        "crop",
        "the picture after the central crop, uint8 [S, S, 3]",
        0.0,
        "a crop that one loop lacks, or its area (0.9) taken as a side",
    ),
    Boundary(
        "state",
        "the robot's state as observed: position (m), axis times angle (rad), finger joints (m)",
        1e-6,
        "the sign of a quaternion, the order of its numbers, another frame of reference",
    ),
    Boundary(
        "proprioception",
        "the state as the network gets it, [-1, 1]",
        1e-6,
        "other statistics, or percentiles taken for minimum and maximum",
    ),
    Boundary(
        "prompt_ids",
        "token ids of the prompt, int64 [P], without padding",
        0.0,
        "another prompt, capital letters, a missing BOS or the space at the end",
    ),
    Boundary(
        "tokens",
        "the chosen tokens, int64 [T], or numbers, float32 [T]",
        1e-4,
        "weights, attention mask (OpenVLA-OFT's is bidirectional), dtype, or sampling",
    ),
    Boundary(
        "unit_action",
        "the chunk's numbers in [-1, 1], [H, D]",
        1e-4,
        "another number of bins, or bin edges taken for centres",
    ),
    Boundary(
        "action",
        "the chunk in the units of the training data, [H, D], before the gripper is converted",
        1e-4,
        "other statistics: the suite's key, percentiles or minimum and maximum, the mask",
    ),
    Boundary(
        "executed_action",
        "the actions that the environment got, [N, D], N <= H",
        1e-4,
        "the gripper's sign or threshold, clipping, a chunk cut short",
    ),
    Boundary(
        "success",
        "whether the task was solved, bool, once at the end",
        0.0,
        "the step limit, or a goal that is checked at another time",
    ),
)
"""All boundaries, in the order in which an episode produces their values."""
