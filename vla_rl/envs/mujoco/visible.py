"""Find the geoms that a camera can see; leaving the others out does not change the picture.

A software renderer spends its time on the corners of triangles, before it knows which of them are
in the picture. The camera in the hand sees a tenth of a scene, and most of the robot is behind it.
A geom is left out if its bounding box lies wholly beyond one side of the camera's pyramid, and no
mirror shows it either. MuJoCo mirrors in the upper face of boxes and planes; what a mirror shows
lies in the pyramid from the mirrored eye through that face.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.envs.mujoco.loading import load_mujoco

_MARGIN_M = 2e-3
"""Distance beyond a side that a box has to have (m): more than the rounding of OpenGL's single
precision."""


class Visible:
    """Finds the geoms of one model, with its look applied, that a camera may see.

    Args:
        model: MuJoCo's own model, with the groups of geoms already set for drawing.
        groups: 1 for each visible group of geoms, else 0.
    """

    def __init__(self, model: Any, groups: Sequence[int]) -> None:
        kinds = load_mujoco().mjtGeom
        self._fields_of_view = np.deg2rad(model.cam_fovy)
        self._centres, self._halves = model.geom_aabb[:, :3].copy(), model.geom_aabb[:, 3:].copy()
        is_plane, has_material = model.geom_type == kinds.mjGEOM_PLANE, model.geom_matid >= 0
        is_drawn = np.take(groups, model.geom_group).astype(bool)
        reflectance = np.append(model.mat_reflectance, 0.0)[model.geom_matid]
        is_mirror = (
            is_drawn
            & has_material
            & (reflectance > 0)
            & (is_plane | (model.geom_type == kinds.mjGEOM_BOX))
        )
        self._mirrors = [
            (geom, model.geom_size[geom].copy(), bool(is_plane[geom]))
            for geom in np.flatnonzero(is_mirror)
        ]
        self._is_always = is_plane | is_mirror
        """Planes have no box, and MuJoCo reflects in the first mirror of a scene."""

    def visible_geoms(self, camera: int, drawn: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return bool [ngeom]: False for the geoms that are certainly not in the picture of
        `camera`.

        Args:
            camera: its number in the model.
            drawn: `Sample.drawn`: all poses at one instant.
        """
        turns = drawn["geom_xmat"].reshape(-1, 3, 3)
        centres = drawn["geom_xpos"] + np.einsum("gij,gj->gi", turns, self._centres)
        eye = drawn["cam_xpos"][camera]
        axes = drawn["cam_xmat"][camera].reshape(3, 3)
        sides = _sides_of_view(axes, self._fields_of_view[camera])
        is_seen: np.ndarray = self._is_always | self._is_in_pyramid(eye, sides, centres, turns)
        for geom, size, is_plane in self._mirrors:
            if is_plane and not size[:2].all():
                return np.ones(len(centres), bool)  # an endless mirror shows everything
            normal = turns[geom, :, 2]
            face = drawn["geom_xpos"][geom] + (0.0 if is_plane else size[2]) * normal
            height = float((eye - face) @ normal)
            if height > 0.0:
                mirrored = eye - 2.0 * height * normal
                through_face = _sides_of_face(mirrored, face, turns[geom], size)
                is_seen |= self._is_in_pyramid(mirrored, through_face, centres, turns)
        return is_seen

    def _is_in_pyramid(
        self, tip: np.ndarray, sides: np.ndarray, centres: np.ndarray, turns: np.ndarray
    ) -> np.ndarray:
        """Return bool [ngeom]: False if wholly beyond one side of a pyramid, given by unit normals
        [n, 3] outwards.
        """
        reach = np.einsum("gsj,gj->gs", np.abs(sides @ turns), self._halves)
        is_beyond: np.ndarray = (centres - tip) @ sides.T > reach + _MARGIN_M
        return np.logical_not(is_beyond.any(axis=1))


def _sides_of_view(axes: np.ndarray, field_of_view: float) -> np.ndarray:
    """Return outward normals [5, 3]: left, right, top and bottom of a square picture, and the back
    of the camera.

    A camera looks along its negative z axis, the last column of `axes`.
    """
    slope = np.tan(field_of_view / 2)
    sides = np.array([[1, 0, slope], [-1, 0, slope], [0, 1, slope], [0, -1, slope]]) / np.hypot(
        1.0, slope
    )
    return np.asarray(np.vstack([sides, [0.0, 0.0, 1.0]]) @ axes.T)


def _sides_of_face(
    eye: np.ndarray, face: np.ndarray, axes: np.ndarray, size: np.ndarray
) -> np.ndarray:
    """Return outward normals [4, 3] of the pyramid from `eye` through the rectangle around `face`
    in the first two of `axes`.
    """
    corners = np.array([[1, 1], [-1, 1], [-1, -1], [1, -1]]) * size[:2]
    rays = face + corners @ axes[:, :2].T - eye
    normals = np.cross(rays, np.roll(rays, -1, axis=0))
    normals *= -np.sign(normals @ (face - eye))[:, None]
    return np.asarray(normals / np.linalg.norm(normals, axis=1, keepdims=True))
