"""Looks change a model only while it is drawn; fast images look like exact ones at a fraction of the triangles."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv, scene
from vla_rl.envs.mujoco import drawing_quality
from vla_rl.envs.mujoco.meshes import Mesh, Texture, simplify

LOOKS = ("geom_group", "geom_rgba", "geom_matid")


@pytest.fixture(scope="module")
def fast_env(assets: str) -> Iterator[LiberoEnv]:
    with pytest.MonkeyPatch.context() as patch:
        # a scene that an earlier file of this process has prepared may be lent to `object_env`
        patch.setattr(scene, "_prepared", {})
        patch.setattr(scene, "_in_use", set())
        patch.setattr(scene, "_spare_cameras", {})
        LiberoEnv.prepare("libero_object", task_id=1)
        env = LiberoEnv("libero_object", task_id=1, image_size=96, physics="fast", quality="fast")
        yield env
        env.close()


def test_a_fast_image_shows_the_same_scene_with_a_plainer_robot(
    object_env: LiberoEnv, fast_env: LiberoEnv
) -> None:
    exact, _ = object_env.reset(options={"init_state_id": 3})
    fast, info = fast_env.reset(options={"init_state_id": 3})
    assert (info["physics"], info["quality"]) == ("fast", "fast")
    for camera in ("image", "wrist_image"):
        difference = np.abs(exact[camera].astype(int) - fast[camera]).max(axis=2)
        # edges and the robot; the floor and the objects are the same
        assert 0.0 < (difference > 40).mean() < 0.15
    # the robot is in the image: bright pixels in the upper half, where the hand is in both
    hand = exact["image"][:48, 30:66].mean()
    assert abs(fast["image"][:48, 30:66].mean() - hand) < 0.25 * hand


def test_a_closed_environment_leaves_the_cached_model_as_it_was(
    fast_env: LiberoEnv, object_env: LiberoEnv
) -> None:
    scene = fast_env.scene
    assert scene.model.vis.quality.offsamples == 0
    fast_env.close()
    for name in LOOKS:
        np.testing.assert_array_equal(
            getattr(scene.model, name), getattr(object_env.scene.model, name)
        )
    assert scene.model.vis.quality.offsamples == object_env.scene.model.vis.quality.offsamples
    again = LiberoEnv("libero_object", task_id=1, image_size=96)
    assert again.scene is scene
    observation, _ = again.reset(options={"init_state_id": 3})
    np.testing.assert_equal(observation, object_env.reset(options={"init_state_id": 3})[0])
    again.close()


def test_the_cameras_of_a_prepared_scene_serve_the_next_environment_that_draws_the_same(
    fast_env: LiberoEnv,
) -> None:
    fast_env.close()
    like_it: dict[str, Any] = {"image_size": 96, "quality": "fast"}
    before = LiberoEnv("libero_object", task_id=1, **like_it, physics="fast")
    first, _ = before.reset(options={"init_state_id": 3})
    cameras = before._cameras
    before.close()
    again = LiberoEnv("libero_object", task_id=1, **like_it, physics="exact")
    second, _ = again.reset(options={"init_state_id": 3})
    assert again._cameras is cameras
    for name in ("image", "wrist_image"):
        assert np.array_equal(first[name], second[name])
    again.close()
    smaller = LiberoEnv("libero_object", task_id=1, **{**like_it, "image_size": 64})
    observation, _ = smaller.reset(options={"init_state_id": 3})
    assert smaller._cameras is not cameras
    assert observation["image"].shape == (64, 64, 3)
    smaller.close()


SIZE, INIT_STATE_ID = 84, 3
GIVEN_TO_OPENGL = (
    *("mesh_face", "mesh_facenormal", "mesh_facetexcoord", "mesh_facenum", "mesh_graphadr"),
    *("tex_data", "tex_width", "tex_height"),
)
"""Arrays of a model that are others while a render context is made."""


@pytest.fixture(scope="module")
def task(assets: str) -> dict[str, Any]:
    task = {"suite": "libero_object", "task_id": 1, "assets": assets, "image_size": SIZE}
    LiberoEnv.prepare(**task, quality="fast")
    return task


@contextlib.contextmanager
def started(task: dict[str, Any], quality: str) -> Iterator[LiberoEnv]:
    """An environment whose cameras are open."""
    env = LiberoEnv(**task, physics="fast", quality=quality)  # type: ignore[arg-type]
    env.reset(options={"init_state_id": INIT_STATE_ID})
    yield env
    env.close()


def draw_images(env: LiberoEnv) -> np.ndarray:
    """Both cameras at two instants: int [4, S, S, 3]."""
    seen = [env.reset(options={"init_state_id": INIT_STATE_ID})[0]]
    seen.append(env.step(np.full(7, 0.5, np.float32))[0])
    return np.array([each[name] for each in seen for name in ("image", "wrist_image")], int)


def test_a_fast_image_is_that_of_the_whole_meshes_up_to_a_pixel_here_and_there(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(task, "fast") as env:
        images = draw_images(env)
    for name in ("simplified_meshes", "reduced_textures"):
        monkeypatch.setattr(drawing_quality, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(scene, "_spare_cameras", {})  # else its cameras would draw these too
    with started(task, "fast") as env:
        differences = np.abs(draw_images(env) - images)
    assert 0.0 < differences.mean() < 0.6
    assert (differences.max(axis=-1) > 40).mean() < 0.01


def test_neither_opening_the_cameras_nor_drawing_changes_the_model_or_the_physics(
    task: dict[str, Any],
) -> None:
    states = []
    for quality in ("fast", "exact"):
        with started(task, quality) as env:
            model = env.scene.model
            arrays = {name: getattr(model, name).copy() for name in GIVEN_TO_OPENGL}
            env.step(np.full(7, 0.5, np.float32))
            states.append((arrays, env.scene.get_state()["physics"]))
    (fast, state), (exact, other) = states
    np.testing.assert_array_equal(state, other)
    for name in GIVEN_TO_OPENGL:
        np.testing.assert_array_equal(fast[name], exact[name])


def test_the_quality_exact_is_given_whole_meshes_and_textures(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the quality exact asked for other meshes or textures")

    for name in ("simplified_meshes", "get_simplified_mesh", "reduced_textures"):
        monkeypatch.setattr(drawing_quality, name, refuse)
    with started(task, "exact"):
        pass
    LiberoEnv.prepare(**task, quality="exact")


def test_a_prepared_process_simplifies_nothing_again(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a mesh was simplified again")

    monkeypatch.setattr(drawing_quality, "simplify", refuse)
    with started(task, "fast"):
        pass


def test_the_meshes_of_a_scene_have_a_fraction_of_their_triangles(task: dict[str, Any]) -> None:
    with started(task, "fast") as env:
        model, is_drawn = env.scene.model, env._cameras._look._is_drawn()  # type: ignore[union-attr]
        whole = int(model.mesh_facenum[is_drawn].sum())
        with drawing_quality.simplified_meshes(model, is_drawn, SIZE):
            fewer = int(model.mesh_facenum[is_drawn].sum())
        assert int(model.mesh_facenum[is_drawn].sum()) == whole
    assert fewer < whole / 2


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
    points, faces = grid(121)
    longitude, latitude = 2 * np.pi * points[:, 0], np.pi * points[:, 1]
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
    points = mesh.texture.coordinates[fewer.texture_faces]
    np.testing.assert_allclose(points, mesh.vertices[fewer.faces][..., :2] / 0.1, atol=1e-6)


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
