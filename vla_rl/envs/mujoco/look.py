"""Drawing quality of a model: as its simulator draws it, or several times faster with rougher edges.

A software renderer spends its time on triangles and samples, hardly on pixels. MuJoCo draws four
samples for each pixel, and for each shadow all triangles once more into a map of thousands of
pixels a side. The quality "fast" takes one sample, no shadows, a plainer robot, and meshes and
textures without the detail that a picture of this size cannot show.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.reduced_textures import only_textures, reduced_textures, used_textures
from vla_rl.envs.mujoco.upload import only_meshes, simplified_mesh, simplified_meshes

Quality: TypeAlias = Literal["exact", "fast"]
"""exact: the simulator's own pixels. fast: no multisampling, no shadows, a plainer robot, less
detail.
"""

HIDDEN_GROUP = 5
"""A group of geoms that no style draws."""


class Style(NamedTuple):
    """How the models of one simulator are drawn."""

    groups: tuple[int, int, int, int, int, int]
    """1 for each group of geoms that is visible, else 0."""

    draw_plainly: Callable[[Any], None]
    """Makes the robot of a model cheap to draw, by groups, colours and materials of geoms, which
    `Look.undo` restores. It may change more in a model that is only drawn."""

    has_fine_detail: bool
    """Whether meshes and textures have more detail than small pictures show, which "fast" then
    leaves out."""


class Look:
    """Changes a model so that it is drawn in one quality, until `undo`.

    Args:
        model: MuJoCo's own model.
        size: side of the pictures, in pixels.
        quality: "exact" or "fast".
        style: how its simulator draws it.
    """

    def __init__(self, model: Any, size: int, quality: Quality, style: Style) -> None:
        self._model, self._groups, self._style = model, style.groups, style
        self._size, self._quality = size, quality
        self._is_reduced = quality == "fast" and style.has_fine_detail
        buffer, drawing = model.vis.global_, model.vis.quality
        self._before = (buffer.offwidth, buffer.offheight, drawing.offsamples, drawing.shadowsize)
        self._arrays_before = {
            name: getattr(model, name).copy() for name in ("geom_group", "geom_rgba", "geom_matid")
        }
        self.has_shadows = quality == "exact" and bool(model.light_castshadow.any())
        """Whether a light casts shadows, also those of geoms beside the picture."""

        self.apply()

    def apply(self) -> None:
        """Change the model, again after an `undo`."""
        buffer, drawing = self._model.vis.global_, self._model.vis.quality
        buffer.offwidth = buffer.offheight = self._size
        if not self.has_shadows:
            drawing.shadowsize = 0  # MuJoCo's shadow map takes 64 MB, used or not
        if self._quality == "fast":
            drawing.offsamples = 0
            self._style.draw_plainly(self._model)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Within this context, a new render context uploads the meshes as this look draws them."""
        with contextlib.ExitStack() as stack:
            is_visible = np.take(self._groups, self._model.geom_group).astype(bool)
            stack.enter_context(only_textures(self._model, used_textures(self._model, is_visible)))
            stack.enter_context(only_meshes(self._model, self._is_drawn()))
            if self._is_reduced:
                stack.enter_context(simplified_meshes(self._model, self._is_drawn(), self._size))
                stack.enter_context(reduced_textures(self._model, self._size))
            yield

    def prepare(self) -> None:
        """Simplify the meshes now, for this process and those forked from it."""
        if self._is_reduced:
            for mesh in np.flatnonzero(self._is_drawn()):
                simplified_mesh(self._model, mesh, self._size)

    def _is_drawn(self) -> np.ndarray:
        """Return bool [nmesh]."""
        model = self._model
        is_visible = (model.geom_type == load_mujoco().mjtGeom.mjGEOM_MESH) & np.take(
            self._groups, model.geom_group
        ).astype(bool)
        return np.isin(np.arange(model.nmesh), model.geom_dataid[is_visible])

    def undo(self) -> None:
        """Restore the model."""
        model, (width, height, samples, shadows) = self._model, self._before
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        model.vis.quality.offsamples, model.vis.quality.shadowsize = samples, shadows
        for name, array in self._arrays_before.items():
            getattr(model, name)[:] = array
