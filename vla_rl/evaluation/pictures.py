"""Which pictures of LIBERO a policy sees unless the command line chooses: those that it was trained with."""

import os
from typing import Final, Literal, TypeAlias

from vla_rl.envs.libero.assets import ASSETS_VARIABLE, STAND_INS
from vla_rl.models.loading import is_base_policy

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


def assets_for(checkpoint: str, asked: str | None) -> str | None:
    """The assets to use, as `find_assets` takes them: stand-ins for the policy that ships, which was trained on them."""
    if asked is None and is_base_policy(checkpoint) and not os.environ.get(ASSETS_VARIABLE):
        return STAND_INS
    return asked
