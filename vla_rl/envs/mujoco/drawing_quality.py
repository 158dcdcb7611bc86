"""Drawing quality of a model: as its simulator draws it, or several times faster with rougher edges.

A software renderer spends its time on triangles and samples, hardly on pixels. MuJoCo draws four
samples for each pixel, and for each shadow all triangles once more into a map of thousands of
pixels a side. The quality "fast" takes one sample, no shadows, a plainer robot, and meshes and
textures without the detail that an image of this size cannot show.

OpenGL keeps a copy of each mesh and texture from the moment a render context is made. The model has
other arrays only for that moment, so that nothing that it simulates can depend on them. Simplified
meshes are kept in the process, so that a process that has prepared a scene hands them to its forks,
and scenes with the same plate share it.

OpenGL keeps of each texture a chain of versions, each half as wide as the one before, and draws a
surface from the two whose pixels are about as large as those of the image. The first ones of a
chain that begins with 4096 pixels a side are never used for images of 84, but they take a hundred
times the memory of those that are. Here a chain begins later.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.meshes import Mesh, Simplified, Texture, simplify

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
    `Look.undo_changes` restores. It may change more in a model that is only drawn."""

    has_fine_detail: bool
    """Whether meshes and textures have more detail than small images show, which "fast" then
    leaves out."""


class Look:
    """Changes a model so that it is drawn in one quality, until `undo_changes`.

    Args:
        model: MuJoCo's own model.
        size: side of the images, in pixels.
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
        """Whether a light casts shadows, also those of geoms outside the image."""

        self.apply_changes()

    def apply_changes(self) -> None:
        """Change the model, again after `undo_changes`."""
        buffer, drawing = self._model.vis.global_, self._model.vis.quality
        buffer.offwidth = buffer.offheight = self._size
        if not self.has_shadows:
            # MuJoCo's shadow map takes 64 MB, used or not.
            drawing.shadowsize = 0
        if self._quality == "fast":
            # Four samples a pixel double the time of an image, from 30 to 58 ms.
            drawing.offsamples = 0
            self._style.draw_plainly(self._model)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[None]:
        """Within this context, a new render context uploads the meshes as this look draws them."""
        with contextlib.ExitStack() as stack:
            is_visible = np.take(self._groups, self._model.geom_group).astype(bool)
            stack.enter_context(
                upload_only_textures(self._model, used_textures(self._model, is_visible))
            )
            stack.enter_context(upload_only_meshes(self._model, self._is_drawn()))
            if self._is_reduced:
                stack.enter_context(simplified_meshes(self._model, self._is_drawn(), self._size))
                stack.enter_context(reduced_textures(self._model, self._size))
            yield

    def simplify_meshes(self) -> None:
        """Simplify the meshes now, for this process and those forked from it."""
        if self._is_reduced:
            for mesh in np.flatnonzero(self._is_drawn()):
                get_simplified_mesh(self._model, mesh, self._size)

    def _is_drawn(self) -> np.ndarray:
        """Return bool [nmesh]."""
        model = self._model
        is_visible = (model.geom_type == load_mujoco().mjtGeom.mjGEOM_MESH) & np.take(
            self._groups, model.geom_group
        ).astype(bool)
        return np.isin(np.arange(model.nmesh), model.geom_dataid[is_visible])

    def undo_changes(self) -> None:
        """Restore the model."""
        model, (width, height, samples, shadows) = self._model, self._before
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        model.vis.quality.offsamples, model.vis.quality.shadowsize = samples, shadows
        for name, array in self._arrays_before.items():
            getattr(model, name)[:] = array


_CELL_PER_PIXEL: Final = 0.2
"""Side of the smallest cell (m), times the side of the image in pixels: a third of a pixel half a
metre in front of LIBERO's fixed camera."""

_TOLERANCE_PER_PIXEL: Final = 0.03
"""Distance between a mesh and a larger cell's vertex (m), times the side of the image in pixels."""

_TRIANGLE_FIELDS: Final = ("mesh_face", "mesh_facenormal", "mesh_facetexcoord")
"""Arrays of a model with a row for each triangle."""

_simplified: dict[tuple[bytes, int], Simplified] = {}
"""Results by the digest of a mesh and the size of the image; LIBERO has some hundred meshes."""


def uploaded_bytes(model: Any) -> int:
    """Return about how many bytes a render context takes that is made now: each corner of a triangle
    has eight numbers, and each texture four bytes a pixel, with its smaller versions.
    """
    is_cube = model.tex_type != load_mujoco().mjtTexture.mjTEXTURE_2D
    width = model.tex_width.astype(np.int64)
    pixels = width * np.where(is_cube, 6 * width, model.tex_height)
    return int(pixels.sum()) * 16 // 3 + int(model.mesh_facenum.sum()) * 3 * 32


@contextlib.contextmanager
def upload_only_meshes(model: Any, is_drawn: np.ndarray) -> Iterator[None]:
    """Within this context, a new render context uploads only these meshes, without convex hulls.

    Args:
        model: MuJoCo's own model.
        is_drawn: bool [nmesh].
    """
    before = {name: getattr(model, name).copy() for name in ("mesh_facenum", "mesh_graphadr")}
    model.mesh_facenum[~is_drawn] = 0
    # OpenGL would also get the convex hulls, which are never drawn.
    model.mesh_graphadr[:] = -1
    try:
        yield
    finally:
        for name, array in before.items():
            getattr(model, name)[:] = array


@contextlib.contextmanager
def simplified_meshes(model: Any, is_drawn: np.ndarray, size: int) -> Iterator[None]:
    """Within this context, these meshes of the model have only the triangles that an image shows.

    Args:
        model: MuJoCo's own model.
        is_drawn: bool [nmesh].
        size: side of the image, in pixels.
    """
    numbers = model.mesh_facenum.copy()
    before = []
    try:
        for mesh in np.flatnonzero(is_drawn):
            first, fewer = model.mesh_faceadr[mesh], get_simplified_mesh(model, mesh, size)
            rows = slice(first, first + len(fewer.kept))
            before.append((rows, [getattr(model, name)[rows].copy() for name in _TRIANGLE_FIELDS]))
            model.mesh_face[rows] = fewer.faces
            model.mesh_facenormal[rows] = model.mesh_facenormal[first + fewer.kept]
            if fewer.texture_faces is not None:
                model.mesh_facetexcoord[rows] = fewer.texture_faces
            model.mesh_facenum[mesh] = len(fewer.kept)
        yield
    finally:
        for rows, arrays in before:
            for name, array in zip(_TRIANGLE_FIELDS, arrays, strict=True):
                getattr(model, name)[rows] = array
        model.mesh_facenum[:] = numbers


def get_simplified_mesh(model: Any, mesh: int, size: int) -> Simplified:
    """Return a mesh of a model with the triangles that an image of this size shows; the second
    time from memory.
    """
    whole = _read_mesh(model, mesh)
    digest = hashlib.blake2b(digest_size=16)
    for array in (whole.vertices, whole.faces, *(whole.texture or ())):
        digest.update(np.ascontiguousarray(array).data)
    key = digest.digest(), size
    if key not in _simplified:
        _simplified[key] = simplify(whole, _CELL_PER_PIXEL / size, _TOLERANCE_PER_PIXEL / size)
    return _simplified[key]


def _read_mesh(model: Any, mesh: int) -> Mesh:
    faces = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    texture = model.mesh_texcoordadr[mesh]
    if texture < 0:
        return Mesh(vertices, model.mesh_face[faces], None)
    coordinates = model.mesh_texcoord[texture:][: model.mesh_texcoordnum[mesh]]
    return Mesh(
        vertices, model.mesh_face[faces], Texture(model.mesh_facetexcoord[faces], coordinates)
    )


_TEXELS_PER_PIXEL: Final = 8
"""A texture keeps as many pixels a side as this many images: more than a camera in a hand uses,
which sees an eighth of a surface."""


@contextlib.contextmanager
def upload_only_textures(model: Any, is_used: np.ndarray) -> Iterator[None]:
    """Within this context, a new render context uploads one pixel of each other texture.

    Args:
        model: MuJoCo's own model.
        is_used: bool [ntex], whether anything that is drawn has the texture.
    """
    sides = model.tex_height.copy(), model.tex_width.copy()
    model.tex_height[~is_used] = model.tex_width[~is_used] = 1
    try:
        yield
    finally:
        model.tex_height[:], model.tex_width[:] = sides


def used_textures(model: Any, is_drawn: np.ndarray) -> np.ndarray:
    """Return bool [ntex]: whether a geom that is drawn has the texture, or what is not a geom.

    Args:
        model: MuJoCo's own model.
        is_drawn: bool [ngeom].
    """
    others = (model.site_matid, model.tendon_matid, model.skin_matid, model.flex_matid)
    materials = np.concatenate([model.geom_matid[is_drawn], *others])
    textures = model.mat_texid[materials[materials >= 0]].reshape(-1)
    is_used: np.ndarray = model.tex_type == load_mujoco().mjtTexture.mjTEXTURE_SKYBOX
    is_used[textures[textures >= 0]] = True
    return is_used


@contextlib.contextmanager
def reduced_textures(model: Any, size: int) -> Iterator[None]:
    """Within this context, flat textures of the model are as small as its images allow.

    Args:
        model: MuJoCo's own model.
        size: side of the image, in pixels.
    """
    before, sides = [], (model.tex_height.copy(), model.tex_width.copy())
    try:
        for texture in np.flatnonzero(model.tex_type == load_mujoco().mjtTexture.mjTEXTURE_2D):
            shape = (int(each[texture]) for each in (*sides, model.tex_nchannel))
            height, width, channels = shape
            first = int(model.tex_adr[texture])
            whole = model.tex_data[first : first + height * width * channels]
            # Most of a simulator's memory was Mesa's copy of textures of up to 4096 pixels a side:
            # 525 MB instead of 325 for one task at 84 pixels.
            texels = halve_texture(whole.reshape(height, width, channels), _TEXELS_PER_PIXEL * size)
            if texels.shape[0] == height:
                continue
            rows = slice(first, first + texels.size)
            before.append((rows, model.tex_data[rows].copy()))
            model.tex_data[rows] = texels.reshape(-1)
            model.tex_height[texture], model.tex_width[texture] = texels.shape[:2]
        yield
    finally:
        for rows, bytes_before in before:
            model.tex_data[rows] = bytes_before
        model.tex_height[:], model.tex_width[:] = sides


def halve_texture(texels: np.ndarray, side: int) -> np.ndarray:
    """Return uint8 [h, w, c] halved, as OpenGL halves it, while both sides stay at least `side`."""
    while min(texels.shape[:2]) >= 2 * side and not (texels.shape[0] % 2 or texels.shape[1] % 2):
        rows = texels[0::2].astype(np.uint16) + texels[1::2]
        texels = ((rows[:, 0::2] + rows[:, 1::2] + 2) >> 2).astype(np.uint8)
    return texels
