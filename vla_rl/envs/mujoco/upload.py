"""The meshes of a model as they are given to OpenGL: only those that are drawn, and for the quality
"fast" with no more triangles than the picture shows.

OpenGL keeps a copy of each mesh from the moment a render context is made. The model has other
arrays only for that moment, so that nothing that it simulates can depend on them. Simplified meshes
are kept in the process, so that a process that has prepared a scene hands them to its forks, and
scenes with the same plate share it.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.simplified_meshes import Mesh, Simplified, Texture, simplify

_CELL: Final = 0.2
"""Side of the smallest cell (m), times the side of the picture in pixels: a third of a pixel half a
metre in front of LIBERO's fixed camera."""

_TOLERANCE: Final = 0.03
"""Distance between a mesh and a larger cell's vertex (m), times the side of the picture in pixels."""

_FIELDS: Final = ("mesh_face", "mesh_facenormal", "mesh_facetexcoord")
"""Arrays of a model with a row for each triangle."""

_kept: dict[tuple[bytes, int], Simplified] = {}
"""Results by the digest of a mesh and the size of the picture; LIBERO has some hundred meshes."""


def uploaded_bytes(model: Any) -> int:
    """Return about how many bytes a render context takes that is made now: each corner of a triangle
    has eight numbers, and each texture four bytes a pixel, with its smaller versions.
    """
    is_cube = model.tex_type != load_mujoco().mjtTexture.mjTEXTURE_2D
    width = model.tex_width.astype(np.int64)
    pixels = width * np.where(is_cube, 6 * width, model.tex_height)
    return int(pixels.sum()) * 16 // 3 + int(model.mesh_facenum.sum()) * 3 * 32


@contextlib.contextmanager
def only_meshes(model: Any, is_drawn: np.ndarray) -> Iterator[None]:
    """Within this context, a new render context uploads only these meshes, without convex hulls.

    Args:
        model: MuJoCo's own model.
        is_drawn: bool [nmesh].
    """
    before = {name: getattr(model, name).copy() for name in ("mesh_facenum", "mesh_graphadr")}
    model.mesh_facenum[~is_drawn] = 0
    model.mesh_graphadr[:] = -1
    try:
        yield
    finally:
        for name, array in before.items():
            getattr(model, name)[:] = array


@contextlib.contextmanager
def simplified_meshes(model: Any, is_drawn: np.ndarray, size: int) -> Iterator[None]:
    """Within this context, these meshes of the model have only the triangles that a picture shows.

    Args:
        model: MuJoCo's own model.
        is_drawn: bool [nmesh].
        size: side of the picture, in pixels.
    """
    numbers = model.mesh_facenum.copy()
    before = []
    try:
        for mesh in np.flatnonzero(is_drawn):
            first, fewer = model.mesh_faceadr[mesh], simplified_mesh(model, mesh, size)
            rows = slice(first, first + len(fewer.kept))
            before.append((rows, [getattr(model, name)[rows].copy() for name in _FIELDS]))
            model.mesh_face[rows] = fewer.faces
            model.mesh_facenormal[rows] = model.mesh_facenormal[first + fewer.kept]
            if fewer.texture_faces is not None:
                model.mesh_facetexcoord[rows] = fewer.texture_faces
            model.mesh_facenum[mesh] = len(fewer.kept)
        yield
    finally:
        for rows, arrays in before:
            for name, array in zip(_FIELDS, arrays, strict=True):
                getattr(model, name)[rows] = array
        model.mesh_facenum[:] = numbers


def simplified_mesh(model: Any, mesh: int, size: int) -> Simplified:
    """Return a mesh of a model with the triangles that a picture of this size shows; the second
    time from memory.
    """
    whole = _mesh(model, mesh)
    digest = hashlib.blake2b(digest_size=16)
    for array in (whole.vertices, whole.faces, *(whole.texture or ())):
        digest.update(np.ascontiguousarray(array).data)
    key = digest.digest(), size
    if key not in _kept:
        _kept[key] = simplify(whole, _CELL / size, _TOLERANCE / size)
    return _kept[key]


def _mesh(model: Any, mesh: int) -> Mesh:
    faces = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
    vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
    texture = model.mesh_texcoordadr[mesh]
    if texture < 0:
        return Mesh(vertices, model.mesh_face[faces], None)
    places = model.mesh_texcoord[texture:][: model.mesh_texcoordnum[mesh]]
    return Mesh(vertices, model.mesh_face[faces], Texture(model.mesh_facetexcoord[faces], places))
