"""How Meta-World's models are drawn: MuJoCo's default groups of geoms, and a plain Sawyer for the
quality "fast".

The Sawyer's meshes have 67 000 triangles, and a scene hardly any others. Most of its links have no
collision shapes that could be drawn instead, so the plain robot has coarse meshes.
"""

from typing import Any, Final

import numpy as np

from vla_rl.envs.mujoco.coarse_meshes import make_coarse
from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.look import Style

_CELL_M: Final = 0.025
"""Finer cells cost more, coarser ones break the outline of the arm."""


def draw_sawyer_plainly(model: Any) -> None:
    """Simplify the meshes of the robot, which share the root of its hand; objects stay exact."""
    is_mesh = model.geom_type == load_mujoco().mjtGeom.mjGEOM_MESH
    robot = model.body_rootid[model.body("hand").id]
    is_robot = model.body_rootid[model.geom_bodyid] == robot
    make_coarse(model, np.unique(model.geom_dataid[is_mesh & is_robot]), _CELL_M)


METAWORLD_STYLE = Style((1, 1, 1, 0, 0, 0), draw_sawyer_plainly, has_fine_detail=False)
