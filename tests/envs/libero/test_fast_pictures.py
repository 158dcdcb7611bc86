"""Fast pictures are drawn from fewer triangles and smaller textures; all else stays as it was."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv, scene
from vla_rl.envs.mujoco import drawing_quality

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


def pictures_of(env: LiberoEnv) -> np.ndarray:
    """Both cameras at two instants: int [4, S, S, 3]."""
    seen = [env.reset(options={"init_state_id": INIT_STATE_ID})[0]]
    seen.append(env.step(np.full(7, 0.5, np.float32))[0])
    return np.array([each[name] for each in seen for name in ("image", "wrist_image")], int)


def test_a_fast_picture_is_that_of_the_whole_meshes_up_to_a_pixel_here_and_there(
    task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(task, "fast") as env:
        pictures = pictures_of(env)
    for name in ("simplified_meshes", "reduced_textures"):
        monkeypatch.setattr(drawing_quality, name, lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(scene, "_spare_cameras", {})  # else its cameras would draw these too
    with started(task, "fast") as env:
        differences = np.abs(pictures_of(env) - pictures)
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
