"""Defaults for the images of LIBERO that a policy sees: those that it was trained with."""

import os
from typing import Final, Literal, TypeAlias

from vla_rl.envs.libero.assets import ASSETS_VARIABLE, STAND_INS
from vla_rl.models.loading import is_base_policy

Quality: TypeAlias = Literal["exact", "fast"]

BASE_POLICY_PICTURES: Final = 84
PUBLISHED_PICTURES: Final = 256
"""Side in pixels of the images that published policies were trained with; `BASE_POLICY_PICTURES` is
the shipped policy's."""


def picture_size_for(checkpoint: str, asked: int | None) -> int:
    """Return the side of the images to render, in pixels."""
    return asked or (BASE_POLICY_PICTURES if is_base_policy(checkpoint) else PUBLISHED_PICTURES)


def quality_for(checkpoint: str, asked: Quality | None) -> Quality:
    """Return the quality of the images to render."""
    return asked or ("fast" if is_base_policy(checkpoint) else "exact")


def assets_for(checkpoint: str, asked: str | None) -> str | None:
    """Return the assets to use, as `find_assets` takes them: stand-ins for the shipped policy,
    which was trained on them.
    """
    if asked is None and is_base_policy(checkpoint) and not os.environ.get(ASSETS_VARIABLE):
        return STAND_INS
    return asked
