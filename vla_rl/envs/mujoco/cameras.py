"""Cameras of one MuJoCo model, which draw images of a recorded instant.

Each instance has a model's cameras, an OpenGL context that it shares with no other open one, and a
scratch state, so that several environments can run in one process and drawing never changes the
simulation. A `Look` sets the quality of the images.

Only geoms that a camera can see are drawn, which does not change the image. A software renderer
spends its time on the corners of triangles, before it knows which of them are in the image. The
camera in the hand sees a tenth of a scene, and most of the robot is behind it. A geom is left out
if its bounding box lies wholly beyond one side of the camera's pyramid, and no mirror shows it
either. MuJoCo mirrors in the upper face of boxes and planes; what a mirror shows lies in the
pyramid from the mirrored eye through that face.
"""

import atexit
import functools
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from vla_rl.envs.mujoco.drawing_quality import HIDDEN_GROUP, Look, Quality, Style, uploaded_bytes
from vla_rl.envs.mujoco.loading import (
    context_errors,
    free_spare_contexts,
    is_forked_with_opengl,
    load_mujoco,
    release_context,
    require_own_opengl,
    short_cause,
    take_context,
)
from vla_rl.errors import EnvError

DRAWN_FIELDS: Final = (
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
    "cam_xpos",
    "cam_xmat",
    "light_xpos",
    "light_xdir",
)
"""Arrays of `MjData` from which MuJoCo draws."""

Orientation: TypeAlias = Literal["upright", "mirrored", "turned"]
"""upright: as the camera sees. mirrored: left and right exchanged. turned: by 180 degrees, for a
camera that is mounted upside down."""

_REVERSED, _ALL = slice(None, None, -1), slice(None)
_FROM_OPENGL: Final = MappingProxyType(
    {
        "upright": (_REVERSED, _ALL),
        "mirrored": (_REVERSED, _REVERSED),
        "turned": (_ALL, _REVERSED),
    }
)
"""Rows and columns to take from an OpenGL image, whose rows run from the bottom up."""

_MAX_GEOMS = 1000
"""Limit of robosuite and gymnasium: further geoms of a scene are not drawn."""

_LOST_CONTEXT: Final = "an image could not be drawn: this environment's OpenGL context was lost"
_REMEDY: Final = (
    "The driver was reset, or its memory is full. Resume the run; if it happens again, render in "
    "fewer processes, or on the CPU with MUJOCO_GL=osmesa."
)

_open_cameras: "weakref.WeakSet[Cameras]" = weakref.WeakSet()

_inherited_contexts: list[object] = []
"""Contexts of this process's parent, kept to the end, because freeing one in a fork would wait
forever."""


class Cameras:
    """Draws square images of a model; in the quality "exact", equal to the simulator's own pixel
    by pixel.

    Args:
        model: MuJoCo's own model; `close` undoes the changes made for drawing.
        cameras: names of the cameras, with the orientation of their images.
        size: height and width in pixels.
        quality, style: see `Look`.
    """

    def __init__(
        self,
        model: Any,
        cameras: Mapping[str, Orientation],
        size: int,
        quality: Quality,
        style: Style,
    ) -> None:
        mujoco = load_mujoco()
        self._mujoco, self._model, self._size = mujoco, model, size
        self._ids = {
            name: mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, name) for name in cameras
        }
        self._orientations = dict(cameras)
        self._look = Look(model, size, quality, style)
        self._visible = VisibleGeoms(model, style.groups)
        # A state of its own for drawing: two rendering environments of robosuite in one process
        # gave wrong images, in silence.
        self._data = mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, maxgeom=_MAX_GEOMS)
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = style.groups
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._viewport = mujoco.MjrRect(0, 0, size, size)
        self._is_lost = False
        self._context: Any = take_context(size)
        self._context.make_current()
        with self._look.uploading():
            self.num_bytes = uploaded_bytes(model)
            """Size of the meshes and textures that OpenGL holds for these cameras."""

            self._renderer: Any = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._renderer)
        _open_cameras.add(self)
        _close_all_at_exit()

    @property
    def is_lost(self) -> bool:
        """Whether the OpenGL context was lost, so that these cameras draw nothing any more."""
        return self._is_lost

    def draw(
        self, drawn: Mapping[str, np.ndarray], names: tuple[str, ...]
    ) -> tuple[np.ndarray, ...]:
        """Draw one uint8 [size, size, 3] RGB image for each named camera.

        Args:
            drawn: the arrays of `DRAWN_FIELDS` at one instant, and `site_rgba`, the colours of the
                sites.
            names: names of the cameras.
        """
        if self._context is None:
            raise RuntimeError("these cameras are closed; make a new environment.")
        require_own_opengl()
        for name, array in drawn.items():
            if name != "site_rgba":
                getattr(self._data, name)[:] = array
        self._take_context()
        model = self._model
        colours, groups = model.site_rgba.copy(), model.geom_group.copy()
        model.site_rgba[:] = drawn["site_rgba"]
        try:
            images = []
            for name in names:
                camera = self._ids[name]
                # A geom outside the image may cast a shadow into it.
                if not self._look.has_shadows:
                    model.geom_group[:] = np.where(
                        self._visible.visible_geoms(camera, drawn), groups, HIDDEN_GROUP
                    )
                rows = self._draw_camera(camera)
                oriented = rows[_FROM_OPENGL[self._orientations[name]]]
                images.append(np.ascontiguousarray(oriented))
            return tuple(images)
        finally:
            model.site_rgba[:], model.geom_group[:] = colours, groups

    def _take_context(self) -> None:
        try:
            self._context.make_current()
        except context_errors() as error:
            self._is_lost = True
            raise EnvError(f"{_LOST_CONTEXT} ({short_cause(error)}). {_REMEDY}") from error

    def _draw_camera(self, camera: int) -> np.ndarray:
        """Return the image as OpenGL stores it, its rows from the bottom up."""
        mujoco = self._mujoco
        self._camera.fixedcamid = camera
        every = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            self._model, self._data, self._option, None, self._camera, every, self._scene
        )
        mujoco.mjr_render(self._viewport, self._scene, self._renderer)
        rows = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_readPixels(rows, None, self._viewport, self._renderer)
        # a lost context reports nothing by itself: the rows would be what was in this memory before
        if code := mujoco.mjr_getError():
            self._is_lost = True
            raise EnvError(f"{_LOST_CONTEXT} (OpenGL's error {code:#06x}). {_REMEDY}")
        return rows

    def suspend_look(self) -> None:
        """Restore the model until `resume_look`, and keep what was uploaded."""
        self._look.undo_changes()

    def resume_look(self) -> None:
        """Change the model again so that these cameras draw it as before `suspend_look`."""
        self._look.apply_changes()

    def close(self) -> None:
        """Free what the images need, and leave a working OpenGL context to the next cameras; a
        second call does nothing.
        """
        if self._context is None:
            return
        if is_forked_with_opengl():
            _inherited_contexts.append((self._context, self._renderer))
        else:
            try:
                self._context.make_current()
                self._renderer.free()
                if self._is_lost or self._mujoco.mjr_getError():
                    self._context.free()
                else:
                    release_context(self._context, self._size)
            except context_errors():
                # lost, so there is nothing to free; else its destructor tries again and prints a
                # traceback
                self._context._context = None
        self._look.undo_changes()
        self._context = self._renderer = None

    def __del__(self) -> None:
        if hasattr(self, "_renderer"):
            self.close()


@functools.cache
def _close_all_at_exit() -> None:
    """Free all contexts at exit before EGL itself is shut down.

    Registered after the first context.
    """
    # Contexts that Python frees after EGL was shut down print tracebacks, as robosuite's do.
    atexit.register(_close_all)


def _close_all() -> None:
    for cameras in list(_open_cameras):
        cameras.close()
    free_spare_contexts()


_MARGIN_M = 2e-3
"""Distance beyond a side that a box has to have (m): more than the rounding of OpenGL's single
precision."""


class VisibleGeoms:
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
        # A mirror that is left out would make MuJoCo reflect in another one.
        self._is_always = is_plane | is_mirror
        """Planes have no box, and MuJoCo reflects in the first mirror of a scene."""

    def visible_geoms(self, camera: int, drawn: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return bool [ngeom]: False for the geoms that are certainly not in the image of
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
                # An endless mirror shows everything.
                return np.ones(len(centres), bool)
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
    """Return outward normals [5, 3]: left, right, top and bottom of a square image, and the back
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
