"""How a model is drawn: as robosuite draws it, or several times faster at the price of smoothness.

A software renderer spends its time on triangles and on samples, hardly on pixels. The visual meshes of the Panda and its
mount alone have 168 000 triangles, a multiple of everything else on a table of stand-ins, and MuJoCo draws four samples for
each pixel. The quality "fast" takes one sample, and draws the robot by its collision meshes, in the robot's colours.
"""

from typing import Any, Literal, TypeAlias

from vla_rl.envs.libero.simulator import load_simulator

Quality: TypeAlias = Literal["exact", "fast"]
"""exact: robosuite's pixels. fast: no multisampling, a plainer robot."""

_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_COLLISION_GROUP, _VISUAL_GROUP, _HIDDEN_GROUP = 0, 1, 5
DRAWN_GROUPS = (0, 1, 1, 0, 0, 0)
"""Which groups of geoms are visible: all that MuJoCo shows by itself but the collision shapes."""

_LIGHT, _DARK = (0.93, 0.93, 0.94, 1.0), (0.22, 0.23, 0.26, 1.0)
_DARK_PARTS = ("link1", "link3", "link5", "link7", "finger", "mount")


class Look:
    """Changes a model so that it is drawn in one quality, until `undo`.

    Args:
        model: MuJoCo's own model.
        size: of the pictures, in pixels; the off-screen buffer is enlarged where they need it.
        quality: "exact" or "fast".
    """

    def __init__(self, model: Any, size: int, quality: Quality) -> None:
        self._model = model
        buffer = model.vis.global_
        self._before = (buffer.offwidth, buffer.offheight, model.vis.quality.offsamples)
        self._arrays_before = {name: getattr(model, name).copy() for name in ("geom_group", "geom_rgba", "geom_matid")}
        buffer.offwidth, buffer.offheight = max(buffer.offwidth, size), max(buffer.offheight, size)
        if quality == "fast":
            model.vis.quality.offsamples = 0
            self._draw_robot_by_its_collision_shapes()

    def undo(self) -> None:
        """Put the model back as it was."""
        model = self._model
        model.vis.global_.offwidth, model.vis.global_.offheight, model.vis.quality.offsamples = self._before
        for name, array in self._arrays_before.items():
            getattr(model, name)[:] = array

    def _draw_robot_by_its_collision_shapes(self) -> None:
        mujoco, model = load_simulator().mujoco, self._model
        for geom in range(model.ngeom):
            body = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_BODY, model.geom_bodyid[geom]) or ""
            if not body.startswith(_ROBOT_PREFIXES):
                continue
            if model.geom_group[geom] != _COLLISION_GROUP:
                model.geom_group[geom] = _HIDDEN_GROUP
                continue
            name = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_GEOM, geom) or ""
            is_dark = any(part in body or part in name for part in _DARK_PARTS)
            model.geom_group[geom] = _VISUAL_GROUP
            model.geom_matid[geom] = -1
            model.geom_rgba[geom] = _DARK if is_dark else _LIGHT
