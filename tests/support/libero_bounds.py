"""Action statistics of LIBERO's four fine-tuning sets."""

from typing import Final

from vla_rl.models.prismatic.action_tokens import ActionBounds


def _libero_bounds(low: tuple[float, ...], high: tuple[float, ...]) -> ActionBounds:
    return ActionBounds(
        low=(*low, 0.0), high=(*high, 1.0), is_scaled=(True,) * 6 + (False,), gripper="openvla"
    )


LIBERO_BOUNDS: Final[dict[str, ActionBounds]] = {
    "libero_spatial": _libero_bounds(
        low=(
            -0.7454732114076613,
            -0.6616071462631226,
            -0.9375,
            -0.1071428582072258,
            -0.20678570866584778,
            -0.1842857152223587,
        ),
        high=(
            0.9375,
            0.8758928775787354,
            0.9321428537368774,
            0.1039285734295845,
            0.17678570747375488,
            0.14571428298950195,
        ),
    ),
    "libero_object": _libero_bounds(
        low=(
            -0.5383928418159485,
            -0.8758928775787354,
            -0.9375,
            -0.06964285671710968,
            -0.11678571254014969,
            -0.15964286029338837,
        ),
        high=(
            0.8464285731315613,
            0.84375,
            0.9375,
            0.08142857253551483,
            0.14892856776714325,
            0.0867857113480568,
        ),
    ),
    "libero_goal": _libero_bounds(
        low=(
            -0.8785714507102966,
            -0.7553571462631226,
            -0.9375,
            -0.1510714292526245,
            -0.1639285683631897,
            -0.13777500048279764,
        ),
        high=(0.9375, 0.9107142686843872, 0.9375, 0.20357142388820648, 0.26357144117355347, 0.375),
    ),
    "libero_10": _libero_bounds(
        low=(
            -0.6348214149475098,
            -0.7741071581840515,
            -0.7633928656578064,
            -0.09749999642372131,
            -0.14819999992847435,
            -0.2742857038974762,
        ),
        high=(
            0.7714285850524902,
            0.8464285731315613,
            0.9375,
            0.13928571343421936,
            0.15964286029338837,
            0.3246428668498993,
        ),
    ),
}
"""Statistics of the four LIBERO fine-tuning sets, as the public OpenVLA checkpoints carry them (q01
and q99)."""
