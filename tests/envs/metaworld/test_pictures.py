"""Pictures of the quality "exact" are those of Meta-World's own renderer; "fast" shows the same for
a tenth of the time.
"""

import copy
from collections.abc import Iterator

import numpy as np
import pytest
from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

from vla_rl.envs.metaworld import MetaWorldEnv
from vla_rl.envs.metaworld.env import draw_sawyer_plainly
from vla_rl.envs.mujoco.loading import choose_graphics

SIZE = 96


def played(quality: str) -> MetaWorldEnv:
    env = MetaWorldEnv("metaworld_mt10", "drawer-open", image_size=SIZE, quality=quality)  # type: ignore[arg-type]
    env.render_every_step = False
    env.reset(options={"init_state_id": 3})
    for _ in range(10):
        env.step(np.array([0.5, 0.5, -0.5, 1.0], np.float32))
    return env


@pytest.fixture(scope="module")
def exact() -> Iterator[MetaWorldEnv]:
    env = played("exact")
    yield env
    env.close()


@pytest.fixture(scope="module")
def fast() -> Iterator[MetaWorldEnv]:
    env = played("fast")
    yield env
    env.close()


def test_an_exact_picture_is_that_of_the_packages_renderer() -> None:
    choose_graphics()
    env = played("exact")
    model, data = env.scene.model, env.scene._env.data
    ours = {key: env._draw_now((key,))[0] for key in ("image", "wrist_image")}
    env._cameras.close()  # type: ignore[union-attr] # else two libraries would share its context
    renderer = MujocoRenderer(model, data, width=SIZE, height=SIZE)
    for key, camera, turns in (("image", "corner2", 2), ("wrist_image", "gripperPOV", 0)):
        renderer.camera_id = model.camera(camera).id
        expected = np.rot90(renderer.render("rgb_array"), turns)
        np.testing.assert_array_equal(ours[key], expected)
    renderer.close()
    env.close()


def test_a_fast_picture_shows_the_same_scene(exact: MetaWorldEnv, fast: MetaWorldEnv) -> None:
    for key in ("image", "wrist_image"):
        (one,), (other,) = exact._draw_now((key,)), fast._draw_now((key,))
        difference = np.abs(one.astype(int) - other).max(axis=2)
        assert 0.0 < (difference > 40).mean() < 0.2  # edges, shadows and the robot


def test_drawing_changes_nothing_of_the_simulation(exact: MetaWorldEnv, fast: MetaWorldEnv) -> None:
    fast._draw_now(("image", "wrist_image"))
    state, other = fast.scene.get_state(), exact.scene.get_state()
    np.testing.assert_array_equal(state["physics"], other["physics"])
    for name in ("geom_type", "mesh_facenum", "geom_group", "geom_rgba"):
        np.testing.assert_array_equal(
            getattr(fast.scene.model, name), getattr(exact.scene.model, name)
        )


def test_the_robots_meshes_alone_have_fewer_triangles_and_the_same_outline() -> None:
    env = MetaWorldEnv("metaworld_mt50", "soccer")
    model = env.scene.model
    coarse = copy.copy(model)
    draw_sawyer_plainly(coarse)
    is_coarse = coarse.mesh_facenum < model.mesh_facenum
    assert coarse.mesh_facenum[is_coarse].sum() < 0.15 * model.mesh_facenum[is_coarse].sum()
    frame = model.mesh("soccer_frame").id
    assert not is_coarse[frame]
    assert model.mesh_facenum[frame] > 4000
    for mesh in np.flatnonzero(is_coarse):
        corners = [corners_of(each, mesh) for each in (model, coarse)]
        for end in (np.min, np.max):
            assert end(corners[0], axis=0) == pytest.approx(end(corners[1], axis=0), abs=0.025)
    env.close()


def corners_of(model: object, mesh: int) -> np.ndarray:
    first, number = model.mesh_faceadr[mesh], model.mesh_facenum[mesh]  # type: ignore[attr-defined]
    faces = model.mesh_face[first : first + number]  # type: ignore[attr-defined]
    vertices: np.ndarray = model.mesh_vert[model.mesh_vertadr[mesh] :][faces.ravel()]  # type: ignore[attr-defined]
    return vertices
