"""Cameras of one MuJoCo model, which draw pictures of a recorded instant.

Each instance has a model's cameras, an OpenGL context that it shares with no other open one, and a
scratch state, so that several environments can run in one process and drawing never changes the
simulation. A `Look` sets the quality of the pictures.
"""

import atexit
import functools
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from vla_rl.envs.mujoco.graphics import (
    cause_in_a_line,
    free_spare_contexts,
    give_back_context,
    is_forked_with_opengl,
    refusals_of_context,
    require_own_opengl,
    take_context,
)
from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.look import HIDDEN_GROUP, Look, Quality, Style
from vla_rl.envs.mujoco.upload import uploaded_bytes
from vla_rl.envs.mujoco.visible import Visible
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

_BACKWARDS, _ALL = slice(None, None, -1), slice(None)
_FROM_OPENGL: Final = MappingProxyType(
    {
        "upright": (_BACKWARDS, _ALL),
        "mirrored": (_BACKWARDS, _BACKWARDS),
        "turned": (_ALL, _BACKWARDS),
    }
)
"""Rows and columns to take from an OpenGL picture, whose rows run from the bottom up."""

_MAX_GEOMS = 1000
"""Limit of robosuite and gymnasium: further geoms of a scene are not drawn."""

_LOST: Final = "a picture could not be drawn: this environment's OpenGL context was lost"
_AFTER_A_LOSS: Final = (
    "The driver was reset, or its memory is full. Resume the run; if it happens again, render in "
    "fewer processes, or on the CPU with MUJOCO_GL=osmesa."
)

_open: "weakref.WeakSet[Cameras]" = weakref.WeakSet()

_inherited: list[object] = []
"""Contexts of this process's parent, kept to the end, because freeing one in a fork would wait
forever."""


class Cameras:
    """Draws square pictures of a model; in the quality "exact", equal to the simulator's own pixel
    by pixel.

    Args:
        model: MuJoCo's own model; `close` undoes the changes made for drawing.
        cameras: names of the cameras, with the orientation of their pictures.
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
        self._visible = Visible(model, style.groups)
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
        _open.add(self)
        _close_all_at_exit()

    @property
    def is_lost(self) -> bool:
        """Whether the OpenGL context was lost, so that these cameras draw nothing any more."""
        return self._is_lost

    def draw(
        self, drawn: Mapping[str, np.ndarray], names: tuple[str, ...]
    ) -> tuple[np.ndarray, ...]:
        """Draw one uint8 [size, size, 3] RGB picture for each named camera.

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
            pictures = []
            for name in names:
                camera = self._ids[name]
                if not self._look.has_shadows:  # else what is beside the picture shades it
                    model.geom_group[:] = np.where(
                        self._visible.visible_geoms(camera, drawn), groups, HIDDEN_GROUP
                    )
                rows = self._draw_camera(camera)
                oriented = rows[_FROM_OPENGL[self._orientations[name]]]
                pictures.append(np.ascontiguousarray(oriented))
            return tuple(pictures)
        finally:
            model.site_rgba[:], model.geom_group[:] = colours, groups

    def _take_context(self) -> None:
        try:
            self._context.make_current()
        except refusals_of_context() as error:
            self._is_lost = True
            raise EnvError(f"{_LOST} ({cause_in_a_line(error)}). {_AFTER_A_LOSS}") from error

    def _draw_camera(self, camera: int) -> np.ndarray:
        """Return the picture as OpenGL stores it, its rows from the bottom up."""
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
            raise EnvError(f"{_LOST} (OpenGL's error {code:#06x}). {_AFTER_A_LOSS}")
        return rows

    def rest(self) -> None:
        """Restore the model until `resume`, and keep what was uploaded."""
        self._look.undo()

    def resume(self) -> None:
        """Change the model again so that these cameras draw it as before `rest`."""
        self._look.apply()

    def close(self) -> None:
        """Free what the pictures need, and leave a sound OpenGL context to the next cameras; a
        second call does nothing.
        """
        if self._context is None:
            return
        if is_forked_with_opengl():
            _inherited.append((self._context, self._renderer))
        else:
            try:
                self._context.make_current()
                self._renderer.free()
                if self._is_lost or self._mujoco.mjr_getError():
                    self._context.free()
                else:
                    give_back_context(self._context, self._size)
            except refusals_of_context():
                # lost, so there is nothing to free; else its destructor tries again and prints a
                # traceback
                self._context._context = None
        self._look.undo()
        self._context = self._renderer = None

    def __del__(self) -> None:
        if hasattr(self, "_renderer"):
            self.close()


@functools.cache
def _close_all_at_exit() -> None:
    """Free all contexts at exit before EGL itself is shut down.

    Registered after the first context.
    """
    atexit.register(_close_all)


def _close_all() -> None:
    for cameras in list(_open):
        cameras.close()
    free_spare_contexts()
