"""Meshes simplified to what an image of some hundred pixels can show.

A scanned carton of milk has 28 000 triangles, and a software renderer pays for each of them, also
if an image has 7 000 pixels. Here the vertices of a mesh that lie in one cell of a grid become one
of them, and triangles that lose a corner by this vanish (Rossignac and Borrel 1993). Cells are
large if the surface in them is flat and small if it is not (Schaefer and Warren 2003): a cell is
divided until its vertex lies within a tolerance of the planes of its triangles, which quadrics
measure (Garland and Heckbert 1997). An open edge, and a seam of the texture, count as a plane at
right angles to the surface, so that a cell with one is flat only along it.

The result uses the vertices, normals and texture coordinates that the mesh has. `make_coarse` has
cells of one size, for meshes whose detail is never seen.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

_LEVELS: Final = 5
"""Sizes of cells: the coarsest is 16 times the finest."""

_UPPER = np.triu_indices(4)
_MULTIPLICITY = np.where(_UPPER[0] == _UPPER[1], 1.0, 2.0)
"""How often each number of the upper triangle stands in a symmetric matrix."""

_TEXTURE_SLACK: Final = 3.0
"""A corner that moves on the surface may move on the texture by this multiple of what is usual in
its mesh; if it moved further, its new coordinates would belong to another part of the texture."""


class Texture(NamedTuple):
    """Texture coordinates of a mesh's corners."""

    faces: np.ndarray
    """int [F, 3]: the coordinates of each corner of each triangle."""

    coordinates: np.ndarray
    """float [T, 2]."""


class Mesh(NamedTuple):
    """A mesh as MuJoCo keeps it.

    Example:
        A square of two triangles, without a texture:

        Mesh(vertices=[[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], faces=[[0, 1, 2], [0, 2, 3]],
             texture=None)
    """

    vertices: np.ndarray
    """float [V, 3], m."""

    faces: np.ndarray
    """int [F, 3]: the vertices of each triangle."""

    texture: Texture | None


class Simplified(NamedTuple):
    """The triangles that are left of a mesh."""

    kept: np.ndarray
    """int [K]: their numbers in the mesh, ascending; each corner keeps its normal."""

    faces: np.ndarray
    """int [K, 3], as in `Mesh`."""

    texture_faces: np.ndarray | None
    """int [K, 3], as in `Texture`; None without one."""


class _Planes(NamedTuple):
    """Planes that pass through points: unit normals, offsets and weights."""

    coefficients: np.ndarray
    """float64 [N, 4]: a point p lies at the distance normal @ p + offset."""

    weights: np.ndarray
    """float64 [N], m^2."""

    points: np.ndarray
    """int [N, k]: the numbers of the points of each plane."""


def simplify(mesh: Mesh, cell_m: float, tolerance_m: float) -> Simplified:
    """Return a mesh with fewer triangles.

    Args:
        mesh: the mesh.
        cell_m: side of the smallest cells (m); vertices of one of them always become one.
        tolerance_m: distance from its surface (m, a root mean square) up to which a larger cell
            becomes one vertex.
    """
    # MuJoCo repeats a vertex for each of its normals and texture coordinates
    points, point_of_vertex = np.unique(mesh.vertices, axis=0, return_inverse=True)
    points, point_of_vertex = points.astype(np.float64), point_of_vertex.reshape(-1)
    corners = point_of_vertex[mesh.faces]
    texture = None if mesh.texture is None else _unique_coordinates(mesh.texture)
    normals, areas = _normals_and_areas(points, corners)
    planes = [
        _planes_of_triangles(points, corners, normals, areas),
        _planes_of_seams(points, corners, texture, normals),
    ]
    moved = _merge_points(points, np.unique(corners), planes, cell_m, tolerance_m)[corners]
    kept = _proper_triangles(moved)
    # a triangle that turned over lies under its neighbours, and MuJoCo draws outsides alone
    turned = _normals_and_areas(points, moved[kept])[0]
    kept = kept[np.einsum("fi,fi->f", normals[kept], turned) >= 0]
    vertex_of_point = np.empty(len(points), np.int64)
    vertex_of_point[point_of_vertex] = np.arange(len(mesh.vertices))
    faces = vertex_of_point[moved[kept]]
    if mesh.texture is None or texture is None:
        return Simplified(kept, faces, None)
    number_of_coordinate = np.empty(len(texture.coordinates), np.int64)
    number_of_coordinate[texture.faces] = mesh.texture.faces
    coordinates = _move_on_texture(texture, points, corners, moved)[kept]
    return Simplified(kept, faces, number_of_coordinate[coordinates])


def _unique_coordinates(texture: Texture) -> Texture:
    """Return the same texture with each coordinate once."""
    coordinates, number = np.unique(texture.coordinates, axis=0, return_inverse=True)
    return Texture(number.reshape(-1)[texture.faces], coordinates.astype(np.float64))


def _normals_and_areas(points: np.ndarray, corners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 [F, 3], zero for a triangle without area, and float64 [F]."""
    a, b, c = (points[corners[:, corner]] for corner in range(3))
    normals = np.cross(b - a, c - a)
    lengths = np.linalg.norm(normals, axis=1)
    return normals / np.where(lengths > 0, lengths, 1.0)[:, None], lengths / 2


def _planes_of_triangles(
    points: np.ndarray, corners: np.ndarray, normals: np.ndarray, areas: np.ndarray
) -> _Planes:
    offsets = -np.einsum("fi,fi->f", normals, points[corners[:, 0]])
    return _Planes(np.column_stack([normals, offsets]), areas, corners)


def _planes_of_seams(
    points: np.ndarray, corners: np.ndarray, texture: Texture | None, normals: np.ndarray
) -> _Planes:
    """Return a plane through each edge that no other triangle continues, at right angles to its
    triangle.
    """
    of_corners = corners if texture is None else corners * len(texture.coordinates) + texture.faces
    edge_starts = np.unique(of_corners, return_inverse=True)[1].reshape(corners.shape)
    after, number = np.roll(edge_starts, -1, axis=1), edge_starts.max(initial=0) + 1
    triangles, edges = np.nonzero(
        ~np.isin(edge_starts * number + after, after * number + edge_starts)
    )
    begins, ends = corners[triangles, edges], corners[triangles, (edges + 1) % 3]
    along = points[ends] - points[begins]
    across = np.cross(along, normals[triangles])
    lengths = np.linalg.norm(across, axis=1)
    across /= np.where(lengths > 0, lengths, 1.0)[:, None]
    offsets = -np.einsum("ei,ei->e", across, points[begins])
    return _Planes(np.column_stack([across, offsets]), lengths**2, np.column_stack([begins, ends]))


def _merge_points(
    points: np.ndarray,
    used: np.ndarray,
    planes: list[_Planes],
    cell_m: float,
    tolerance_m: float,
) -> np.ndarray:
    """Return int [P]: the point that each point becomes, in the largest cell that is flat enough."""
    quadrics, weights = _sum_quadrics(planes, len(points))
    homogeneous = np.column_stack([points, np.ones(len(points))])
    products = homogeneous[:, _UPPER[0]] * homogeneous[:, _UPPER[1]] * _MULTIPLICITY
    becomes, left = np.arange(len(points)), used
    for level in reversed(range(_LEVELS)):
        if not len(left):
            break
        cells = _number_cells(points[left], cell_m * 2**level)
        sums = np.stack([np.bincount(cells, column[left]) for column in quadrics])
        total = np.bincount(cells, weights[left])
        errors = np.einsum("qp,pq->p", sums[:, cells], products[left])
        errors /= np.maximum(total[cells], np.finfo(np.float64).tiny)
        ordered = np.lexsort((errors, cells))
        best = ordered[np.unique(cells[ordered], return_index=True)[1]]
        is_flat = errors[best] <= tolerance_m**2 if level else np.ones(len(best), bool)
        is_done = is_flat[cells]
        becomes[left[is_done]] = left[best[cells[is_done]]]
        left = left[~is_done]
    return becomes


def _sum_quadrics(planes: list[_Planes], num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 [10, P], each point's sum of its planes' quadrics, and [P], that of weights."""
    quadrics, weights = np.zeros((len(_MULTIPLICITY), num_points)), np.zeros(num_points)
    for coefficients, plane_weights, of_points in planes:
        every = of_points.T.reshape(-1)
        repeats = of_points.shape[1]
        weights += np.bincount(every, np.tile(plane_weights, repeats), num_points)
        for quadric, row, column in zip(quadrics, *_UPPER, strict=True):
            values = plane_weights * coefficients[:, row] * coefficients[:, column]
            quadric += np.bincount(every, np.tile(values, repeats), num_points)
    return quadrics, weights


def _number_cells(points: np.ndarray, side_m: float) -> np.ndarray:
    """Return int [P]: equal numbers, from 0 on, for the points of one cell."""
    # a third of a cell off the origin, where the flat sides of symmetric things often lie
    columns = np.floor(points / side_m + 1 / 3).astype(np.int64)
    columns -= columns.min(axis=0)
    sizes = columns.max(axis=0) + 1
    numbers = (columns[:, 0] * sizes[1] + columns[:, 1]) * sizes[2] + columns[:, 2]
    return np.unique(numbers, return_inverse=True)[1].reshape(-1)


def _proper_triangles(corners: np.ndarray) -> np.ndarray:
    """Return the numbers of the triangles with three corners, each only once.

    One that looks the other way has the same corners in another order and stays: a thin plate is
    seen from both sides.
    """
    is_triangle = np.all(corners != np.roll(corners, 1, axis=1), axis=1)
    turns = (np.argmin(corners, axis=1)[:, None] + np.arange(3)) % 3
    turned = np.take_along_axis(corners, turns, axis=1)
    _, one_of_each = np.unique(turned, axis=0, return_index=True)
    return np.intersect1d(np.flatnonzero(is_triangle), one_of_each)


def _move_on_texture(
    texture: Texture, points: np.ndarray, corners: np.ndarray, moved: np.ndarray
) -> np.ndarray:
    """Return int [F, 3]: the texture coordinates of the corners at their new points.

    A point on a seam has several; the nearest is right. If none is near, the corner keeps its own.
    """
    coordinates = texture.coordinates
    of_points = np.unique(np.column_stack([corners.reshape(-1), texture.faces.reshape(-1)]), axis=0)
    first = np.searchsorted(of_points[:, 0], np.arange(len(points)))
    number = np.bincount(of_points[:, 0], minlength=len(points))
    nearest, distances = texture.faces.copy(), np.full(corners.shape, np.inf)
    for turn in range(int(number.max(initial=0))):
        candidates = of_points[np.minimum(first[moved] + turn, len(of_points) - 1), 1]
        away = np.linalg.norm(coordinates[candidates] - coordinates[texture.faces], axis=2)
        away[turn >= number[moved]] = np.inf
        is_nearer = away < distances
        nearest[is_nearer], distances[is_nearer] = candidates[is_nearer], away[is_nearer]
    way = np.linalg.norm(points[moved] - points[corners], axis=2)
    per_metre = _perimeters(coordinates[texture.faces]) / max(_perimeters(points[corners]), 1e-12)
    is_near = distances <= _TEXTURE_SLACK * per_metre * way + 1e-6
    return np.where(is_near, nearest, texture.faces)


def _perimeters(triangles: np.ndarray) -> float:
    """Return the length of all edges of float64 [F, 3, n]."""
    edges = triangles - np.roll(triangles, 1, axis=1)
    return float(np.linalg.norm(edges, axis=2).sum())


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
