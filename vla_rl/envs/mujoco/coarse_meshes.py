"""Coarse meshes: a model's meshes with a tenth of their triangles, for cheap pictures.

The vertices of a mesh that lie in one cell of a grid become one of them, and triangles that lose a
corner by this vanish (Rossignac and Borrel 1993). The model keeps its arrays; each mesh uses the
first part of its own.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np


def make_coarse(model: Any, meshes: Iterable[int], cell_m: float) -> None:
    """Simplify meshes of a model that is only drawn: its collisions would no longer be right.

    Args:
        model: MuJoCo's own model.
        meshes: numbers of the meshes.
        cell_m: side of the grid's cells (m).
    """
    for mesh in meshes:
        first, number = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]
        vertices = model.mesh_vert[model.mesh_vertadr[mesh] :][: model.mesh_vertnum[mesh]]
        cells = np.floor(vertices / cell_m).astype(np.int64)
        _, representatives, of_vertex = np.unique(
            cells, axis=0, return_index=True, return_inverse=True
        )
        corners = representatives[of_vertex.reshape(-1)][model.mesh_face[first : first + number]]
        is_triangle = (
            (corners[:, 0] != corners[:, 1])
            & (corners[:, 1] != corners[:, 2])
            & (corners[:, 2] != corners[:, 0])
        )
        _, one_of_each = np.unique(np.sort(corners, axis=1), axis=0, return_index=True)
        kept = np.intersect1d(np.flatnonzero(is_triangle), one_of_each)
        for name in ("mesh_facenormal", "mesh_facetexcoord"):
            array = getattr(model, name)
            array[first : first + len(kept)] = array[first + kept]
        model.mesh_face[first : first + len(kept)] = corners[kept]
        model.mesh_facenum[mesh] = len(kept)
