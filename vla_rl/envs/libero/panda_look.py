"""How LIBERO's models are drawn: robosuite's groups of geoms, and a plain Panda for the quality
"fast".

The visual meshes of the Panda and its mount alone have 168 000 triangles, a multiple of everything
else on a table of stand-ins. The plain robot is its collision meshes in the robot's colours.
"""

from typing import Any

from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.look import HIDDEN_GROUP, Style

_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
DRAWN_GROUPS = (0, 1, 1, 0, 0, 0)
"""Visible groups of geoms: all that MuJoCo shows by default except the collision shapes."""

_LIGHT, _DARK = (0.93, 0.93, 0.94, 1.0), (0.22, 0.23, 0.26, 1.0)
_DARK_PARTS = ("link1", "link3", "link5", "link7", "finger", "mount")


def draw_panda_plainly(model: Any) -> None:
    """Show the robot's collision shapes instead of its visual meshes."""
    mujoco = load_mujoco()
    for geom in range(model.ngeom):
        body = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_BODY, model.geom_bodyid[geom]) or ""
        if not body.startswith(_ROBOT_PREFIXES):
            continue
        if model.geom_group[geom] != _COLLISION_GROUP:
            model.geom_group[geom] = HIDDEN_GROUP
            continue
        name = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_GEOM, geom) or ""
        is_dark = any(part in body or part in name for part in _DARK_PARTS)
        model.geom_group[geom] = _VISUAL_GROUP
        model.geom_matid[geom] = -1
        model.geom_rgba[geom] = _DARK if is_dark else _LIGHT


LIBERO_STYLE = Style(DRAWN_GROUPS, draw_panda_plainly, has_fine_detail=True)
