"""Policies of LIBERO that ship with this package, and the names that stand for their folders.

Importing this module does not import torch.
"""

from pathlib import Path
from typing import Final

import vla_rl

ASSETS: Final = Path(vla_rl.__file__).parent / "assets"
"""Folder of the files that ship."""

BASE_POLICY: Final = ASSETS / "libero_base"
"""The checkpoint in this package: half-trained on tasks 1 and 6 of libero_object and task 7 of
libero_goal, drawn with LIBERO's own assets."""

PLACEHOLDER_BASE_POLICY: Final = ASSETS / "libero_stand_ins_base"
"""The same on the placeholder assets, and on task 8 of libero_object too."""

SHIPPED: Final = "shipped"
"""Name, instead of a folder, of the one of these two that suits: that was trained on the assets in use, or
that a head was trained over."""

FLOW_BASE_POLICY: Final = ASSETS / "libero_flow_base"
"""A small flow policy, half-trained on tasks 7, 8 and 9 of libero_goal, drawn with LIBERO's own assets."""

SHIPPED_FLOW: Final = "shipped_flow"
"""Name of this one, instead of its folder."""


def is_base_policy(checkpoint: str) -> bool:
    """Return whether this names a LIBERO base policy of this package, however it is written."""
    folder = Path(checkpoint).expanduser().resolve()
    shipped = (BASE_POLICY, PLACEHOLDER_BASE_POLICY, FLOW_BASE_POLICY)
    return checkpoint in (SHIPPED, SHIPPED_FLOW) or folder in [each.resolve() for each in shipped]


def resolve_name(checkpoint: str, shipped: Path) -> str:
    """Return the folder that `shipped` or `shipped_flow` stands for; any other text is a folder or hub id
    already.

    Args:
        checkpoint: a name, a folder or a hub id.
        shipped: the one of the two base policies that `shipped` stands for here.
    """
    if checkpoint == SHIPPED_FLOW:
        return str(FLOW_BASE_POLICY)
    return str(shipped) if checkpoint == SHIPPED else checkpoint
