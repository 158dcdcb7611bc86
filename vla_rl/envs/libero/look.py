"""Drawing quality of a model: as robosuite draws it, or several times faster with rougher edges.

A software renderer spends its time on triangles and samples, hardly on pixels. The visual meshes of
the Panda and its mount alone have 168 000 triangles, a multiple of everything else on a table of
stand-ins, and MuJoCo draws four samples for each pixel. The quality "fast" takes one sample, and
draws the robot by its collision meshes, in the robot's colours.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from vla_rl.envs.libero.simulator import load_simulator

Quality: TypeAlias = Literal["exact", "fast"]
"""exact: robosuite's pixels. fast: no multisampling, a plainer robot."""

_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_COLLISION_GROUP, _VISUAL_GROUP, HIDDEN_GROUP = 0, 1, 5
DRAWN_GROUPS = (0, 1, 1, 0, 0, 0)
"""Visible groups of geoms: all that MuJoCo shows by default except the collision shapes."""

_LIGHT, _DARK = (0.93, 0.93, 0.94, 1.0), (0.22, 0.23, 0.26, 1.0)
_DARK_PARTS = ("link1", "link3", "link5", "link7", "finger", "mount")


class Look:
    """Changes a model so that it is drawn in one quality, until `undo`.

    Args:
        model: MuJoCo's own model.
        size: side of the pictures, in pixels.
        quality: "exact" or "fast".
    """

    def __init__(self, model: Any, size: int, quality: Quality) -> None:
        self._model = model
        buffer, drawing = model.vis.global_, model.vis.quality
        self._before = (buffer.offwidth, buffer.offheight, drawing.offsamples, drawing.shadowsize)
        self._arrays_before = {
            name: getattr(model, name).copy() for name in ("geom_group", "geom_rgba", "geom_matid")
        }
        buffer.offwidth = buffer.offheight = size
        if not model.light_castshadow.any():
            # MuJoCo's shadow map of 64 MB, although no light of LIBERO casts shadows
            drawing.shadowsize = 0
        if quality == "fast":
            drawing.offsamples = 0
            self._draw_robot_by_its_collision_shapes()

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Within this context, a new render context uploads only the meshes that are drawn, without
        their convex hulls.
        """
        model = self._model
        before = {name: getattr(model, name).copy() for name in ("mesh_facenum", "mesh_graphadr")}
        is_visible = (model.geom_type == load_simulator().mujoco.mjtGeom.mjGEOM_MESH) & np.take(
            DRAWN_GROUPS, model.geom_group
        ).astype(bool)
        is_drawn = np.isin(np.arange(model.nmesh), model.geom_dataid[is_visible])
        model.mesh_facenum[~is_drawn] = 0
        model.mesh_graphadr[:] = -1
        try:
            yield
        finally:
            for name, array in before.items():
                getattr(model, name)[:] = array

    def undo(self) -> None:
        """Restore the model."""
        model, (width, height, samples, shadows) = self._model, self._before
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        model.vis.quality.offsamples, model.vis.quality.shadowsize = samples, shadows
        for name, array in self._arrays_before.items():
            getattr(model, name)[:] = array

    def _draw_robot_by_its_collision_shapes(self) -> None:
        mujoco, model = load_simulator().mujoco, self._model
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
