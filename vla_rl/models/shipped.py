"""Policies of LIBERO that ship with this package, and the names that stand for their folders.

Importing this module does not import torch.
"""

import os
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

GOAL_BASE_POLICY: Final = ASSETS / "libero_goal_base"
"""A policy for the ten tasks of libero_goal, also from where another of them has left the scene, drawn with
LIBERO's own assets."""

SHIPPED_GOAL: Final = "shipped_goal"
"""Name of this one, instead of its folder."""

GOAL_PLANNER: Final = ASSETS / "libero_goal_planner"
"""A small language model that was shown how requests in the scene of libero_goal are fulfilled, with mistakes."""

_FOLDERS: Final = {SHIPPED_FLOW: FLOW_BASE_POLICY, SHIPPED_GOAL: GOAL_BASE_POLICY}

NAMES: Final = (SHIPPED, *_FOLDERS)
"""All names."""


def is_base_policy(checkpoint: str) -> bool:
    """Return whether this names a LIBERO base policy of this package, however it is written."""
    folder = Path(os.path.expanduser(checkpoint)).resolve()
    shipped = (BASE_POLICY, PLACEHOLDER_BASE_POLICY, *_FOLDERS.values())
    return checkpoint in NAMES or folder in [each.resolve() for each in shipped]


def resolve_name(checkpoint: str, shipped: Path) -> str:
    """Return the folder that a name stands for; any other text is a folder or hub id already.

    Args:
        checkpoint: `shipped`, `shipped_flow`, `shipped_goal`, a folder or a hub id.
        shipped: the one of the two base policies that `shipped` stands for here.
    """
    named = {SHIPPED: shipped, **_FOLDERS}
    return str(named.get(checkpoint, checkpoint))
