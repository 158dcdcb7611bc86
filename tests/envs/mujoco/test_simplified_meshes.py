"""A simplified mesh has fewer triangles, the same shape within a tolerance, and the same texture."""

import numpy as np
import pytest

from vla_rl.envs.mujoco.meshes import Mesh, Texture, simplify

CELL_M, TOLERANCE_M = 2e-3, 2e-4


def grid(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Vertices [n * n, 2] in the unit square and the faces between them."""
    along = np.linspace(0, 1, number)
    vertices = np.stack(np.meshgrid(along, along, indexing="ij"), axis=-1).reshape(-1, 2)
    corner = np.arange(number * number).reshape(number, number)
    a, b, c, d = corner[:-1, :-1], corner[1:, :-1], corner[1:, 1:], corner[:-1, 1:]
    return vertices, np.concatenate(
        [np.stack([a, b, c], axis=-1).reshape(-1, 3), np.stack([a, c, d], axis=-1).reshape(-1, 3)]
    )


def sheet(side_m: float, number: int = 101) -> Mesh:
    """A flat square with a texture that covers it."""
    vertices, faces = grid(number)
    return Mesh(
        np.column_stack([side_m * vertices, np.zeros(len(vertices))]).astype(np.float32),
        faces,
        Texture(faces, vertices.astype(np.float32)),
    )


def ball(radius_m: float) -> Mesh:
    places, faces = grid(121)
    longitude, latitude = 2 * np.pi * places[:, 0], np.pi * places[:, 1]
    vertices = radius_m * np.column_stack(
        [
            np.sin(latitude) * np.cos(longitude),
            np.sin(latitude) * np.sin(longitude),
            np.cos(latitude),
        ]
    )
    return Mesh(np.round(vertices, 9).astype(np.float32), faces[:, ::-1], None)


def area_of(vertices: np.ndarray, faces: np.ndarray) -> float:
    a, b, c = (vertices[faces[:, corner]] for corner in range(3))
    return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


def test_a_flat_sheet_keeps_its_area_and_a_fiftieth_of_its_triangles() -> None:
    mesh = sheet(0.1)
    fewer = simplify(mesh, CELL_M, TOLERANCE_M)
    assert len(fewer.faces) < len(mesh.faces) / 50
    assert area_of(mesh.vertices, fewer.faces) == pytest.approx(0.01, rel=1e-6)


def test_the_texture_lies_on_the_surface_as_before() -> None:
    mesh = sheet(0.1)
    fewer = simplify(mesh, CELL_M, TOLERANCE_M)
    assert mesh.texture is not None
    assert fewer.texture_faces is not None
    places = mesh.texture.coordinates[fewer.texture_faces]
    np.testing.assert_allclose(places, mesh.vertices[fewer.faces][..., :2] / 0.1, atol=1e-6)


def test_a_seam_of_the_texture_stays_a_line_and_nothing_crosses_it() -> None:
    mesh = sheet(0.1)
    assert mesh.texture is not None
    # the right half of the sheet has a piece of the texture of its own
    is_right = mesh.vertices[mesh.faces][..., 0].mean(axis=1) > 0.05
    number = len(mesh.texture.coordinates)
    cut = Texture(
        mesh.texture.faces + number * is_right[:, None],
        np.concatenate(
            [mesh.texture.coordinates, mesh.texture.coordinates + np.array([5, 0])]
        ).astype(np.float32),
    )
    fewer = simplify(mesh._replace(texture=cut), CELL_M, TOLERANCE_M)
    assert len(fewer.faces) < len(mesh.faces) / 50
    assert fewer.texture_faces is not None
    on_texture = cut.coordinates[fewer.texture_faces][..., 0]
    across = mesh.vertices[fewer.faces][..., 0]
    is_right = is_right[fewer.kept]
    np.testing.assert_allclose(on_texture, across / 0.1 + 5 * is_right[:, None], atol=1e-5)
    assert np.all(across[is_right] > 0.05 - 1e-6)
    assert np.all(across[~is_right] < 0.05 + 1e-6)


def test_a_ball_stays_round() -> None:
    mesh = ball(0.05)
    fewer = simplify(mesh, CELL_M, TOLERANCE_M)
    assert len(fewer.faces) < len(mesh.faces) / 8
    centres = mesh.vertices[fewer.faces].mean(axis=1)
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), 0.05, atol=4 * TOLERANCE_M)
    # the triangles look outwards, slivers apart: MuJoCo does not draw the others
    a, b, c = (mesh.vertices[fewer.faces[:, corner]] for corner in range(3))
    outwards = np.einsum("fi,fi->f", np.cross(b - a, c - a) / 2, centres / 0.05)
    assert -outwards[outwards < 0].sum() < 1e-4 * outwards.sum()
    assert outwards.sum() == pytest.approx(4 * np.pi * 0.05**2, rel=0.02)


def test_both_sides_of_a_plate_thinner_than_a_cell_stay() -> None:
    mesh = sheet(0.1)
    front = mesh.faces
    plate = Mesh(
        np.concatenate([mesh.vertices, mesh.vertices - np.array([0, 0, 1e-4])]).astype(np.float32),
        np.concatenate([front, front[:, ::-1] + len(mesh.vertices)]),
        None,
    )
    fewer = simplify(plate, CELL_M, TOLERANCE_M)
    a, b, c = (plate.vertices[fewer.faces[:, corner]] for corner in range(3))
    up = np.cross(b - a, c - a)[:, 2] / 2
    assert up[up > 0].sum() == pytest.approx(0.01, rel=1e-4)
    assert up[up < 0].sum() == pytest.approx(-0.01, rel=1e-4)


def test_a_mesh_coarser_than_the_cells_is_returned_as_it_is() -> None:
    mesh = sheet(0.1, number=3)
    fewer = simplify(mesh, CELL_M, TOLERANCE_M)
    np.testing.assert_array_equal(fewer.kept, np.arange(len(mesh.faces)))
    np.testing.assert_array_equal(mesh.vertices[fewer.faces], mesh.vertices[mesh.faces])
