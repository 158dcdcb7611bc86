"""Which pictures of LIBERO a policy sees where nobody says otherwise: those that it was taught with."""

from typing import Final, Literal, TypeAlias

from vla_rl.recipes.checkpoints import is_base_policy

Quality: TypeAlias = Literal["exact", "fast"]

BASE_POLICY_PICTURES: Final = 84
PUBLISHED_PICTURES: Final = 256
"""Side in pixels of the pictures that the policy that ships, and published ones, were taught with."""


def picture_size_for(checkpoint: str, asked: int | None) -> int:
    """The side to draw, in pixels."""
    return asked or (BASE_POLICY_PICTURES if is_base_policy(checkpoint) else PUBLISHED_PICTURES)


def quality_for(checkpoint: str, asked: Quality | None) -> Quality:
    """The quality to draw in."""
    return asked or ("fast" if is_base_policy(checkpoint) else "exact")
