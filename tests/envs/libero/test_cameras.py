"""Cameras and their OpenGL contexts: a closed one serves the next cameras; a lost one is an error,
and never the image of other memory.
"""

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.env import CAMERAS, DRAWN_GROUPS
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.mujoco import loading
from vla_rl.envs.mujoco.cameras import DRAWN_FIELDS, Cameras, VisibleGeoms
from vla_rl.envs.mujoco.drawing_quality import (
    Style,
    upload_only_textures,
    uploaded_bytes,
    used_textures,
)
from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.errors import EnvError


def test_an_error_that_opengl_reports_after_drawing_is_raised(object_env: LiberoEnv) -> None:
    before = object_env.reset(options={"init_state_id": 0})[0]["image"]
    from OpenGL.platform import PLATFORM  # bound to EGL or OSMesa by the first image

    PLATFORM.GL.glEnable(0xFFFF)  # no such capability: the context's error flag is set
    with pytest.raises(
        EnvError, match=r"OpenGL context was lost \(OpenGL's error 0x0500\).*MUJOCO_GL=osmesa"
    ):
        object_env.reset(options={"init_state_id": 0})
    after = object_env.reset(options={"init_state_id": 0})[0]["image"]
    assert np.array_equal(after, before)


def test_a_context_that_cannot_be_made_current_any_more_is_named_as_lost(
    object_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    object_env.reset(options={"init_state_id": 0})
    cameras = object_env._cameras
    assert cameras is not None

    def refuse() -> None:
        raise RuntimeError("Failed to make the EGL context current.")

    monkeypatch.setattr(cameras._context, "make_current", refuse)
    with pytest.raises(EnvError, match=r"OpenGL context was lost \(Failed to make the EGL"):
        object_env.step(np.zeros(7, np.float32))


def test_an_environment_whose_context_the_driver_took_says_so_and_can_be_closed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    env = LiberoEnv("libero_object", task_id=1, image_size=32, assets="stand-ins")
    env.reset(options={"init_state_id": 0})
    if os.environ["MUJOCO_GL"] != "egl":
        env.close()
        pytest.skip("the context is EGL's")
    import mujoco.egl
    from OpenGL import EGL

    display = mujoco.egl.EGL_DISPLAY
    EGL.eglMakeCurrent(display, EGL.EGL_NO_SURFACE, EGL.EGL_NO_SURFACE, EGL.EGL_NO_CONTEXT)
    assert env._cameras is not None
    EGL.eglDestroyContext(display, env._cameras._context._context)
    with pytest.raises(EnvError, match=r"context was lost \(EGL_BAD_CONTEXT\)\. .*Resume the run"):
        env.step(np.zeros(7, np.float32))
    capfd.readouterr()
    env.close()
    env.close()
    del env
    gc.collect()
    assert capfd.readouterr().err == ""


def cameras_of(size: int) -> Cameras:
    """Cameras of a model that is built in a millisecond, with a texture."""
    model = load_mujoco().MjModel.from_xml_string(
        "<mujoco><asset><texture name='t' type='2d' builtin='checker' rgb1='1 0 0' rgb2='0 0 1' width='8' "
        "height='8'/><material name='m' texture='t'/></asset><worldbody><light pos='0 0 3'/>"
        "<camera name='c' pos='0 0 3'/><geom type='box' size='1 1 1' material='m'/></worldbody></mujoco>"
    )
    style = Style((1, 1, 1, 1, 1, 0), lambda _model: None, has_fine_detail=False)
    return Cameras(model, {"c": "upright"}, size, "fast", style)


def test_textures_that_nothing_drawn_has_are_not_uploaded() -> None:
    textures = "".join(
        f"<texture name='{name}' type='{kind}' builtin='flat' width='64' height='64'/>"
        for name, kind in (("a", "2d"), ("b", "cube"), ("c", "2d"), ("sky", "skybox"))
    )
    materials = "".join(f"<material name='{name}' texture='{name}'/>" for name in "abc")
    model = load_mujoco().MjModel.from_xml_string(
        f"<mujoco><asset>{textures}{materials}</asset><worldbody><camera name='c'/>"
        "<geom type='box' size='1 1 1' material='a'/>"
        "<geom type='box' size='1 1 1' material='b' group='3'/>"
        "<site name='s' material='c'/></worldbody></mujoco>"
    )
    names = [model.texture(number).name for number in range(model.ntex)]
    is_used = used_textures(model, np.array([True, False]))
    assert [name for name, used in zip(names, is_used, strict=True) if used] == ["a", "c", "sky"]
    before = model.tex_width.copy(), uploaded_bytes(model)
    with upload_only_textures(model, is_used):
        widths = dict(zip(names, model.tex_width.tolist(), strict=True))
        assert widths == {"a": 64, "b": 1, "c": 64, "sky": 64}
        # the six faces of the cube have 64 * 64 pixels of four bytes, and a third more in its chain
        assert before[1] - uploaded_bytes(model) == 6 * (64 * 64 - 1) * 16 // 3
    assert np.array_equal(model.tex_width, before[0])


def image(cameras: Cameras) -> np.ndarray:
    mujoco, model = load_mujoco(), cameras._model
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    drawn = {name: getattr(data, name) for name in DRAWN_FIELDS}
    return cameras.draw({**drawn, "site_rgba": model.site_rgba}, ("c",))[0]


@pytest.fixture
def no_spares(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loading, "_spare_contexts", [])
    yield
    loading.free_spare_contexts()


@pytest.mark.usefixtures("no_spares")
def test_closed_cameras_leave_their_context_to_the_next_that_are_not_larger() -> None:
    first = cameras_of(64)
    context, expected = first._context, image(first)
    assert expected.std() > 10
    first.close()
    larger = cameras_of(80)
    assert larger._context is not context
    again, second = cameras_of(64), cameras_of(64)
    assert again._context is context
    assert second._context not in (context, larger._context)
    assert np.array_equal(image(again), expected)
    assert np.array_equal(image(second), expected)
    for each in (larger, again, second):
        each.close()
    assert len(loading._spare_contexts) == 2
    loading.free_spare_contexts()
    assert np.array_equal(image(cameras_of(64)), expected)


@pytest.mark.usefixtures("no_spares")
def test_a_lost_context_is_left_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = cameras_of(64)
    expected = image(lost)
    with monkeypatch.context() as patch:
        patch.setattr(lost._mujoco, "mjr_getError", lambda: 0x0505)
        with pytest.raises(EnvError, match="OpenGL context was lost"):
            image(lost)
    lost.close()
    assert loading._spare_contexts == []
    assert np.array_equal(image(cameras_of(64)), expected)


@pytest.mark.usefixtures("no_spares")
def test_a_context_stays_in_its_thread() -> None:
    cameras_of(64).close()
    with ThreadPoolExecutor(1) as other_thread:
        there = other_thread.submit(cameras_of, 64).result()
        assert len(loading._spare_contexts) == 1
        assert other_thread.submit(image, there).result().std() > 10
        other_thread.submit(there.close).result()


@pytest.mark.parametrize("init_state_id", [0, pytest.param(7, marks=pytest.mark.proof)])
def test_images_are_the_same_with_everything_drawn(
    goal_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch, init_state_id: int
) -> None:
    # a table, a cabinet, and a stove whose top mirrors
    observation, _ = goal_env.reset(options={"init_state_id": init_state_id})
    for action in np.random.default_rng(init_state_id).uniform(-1, 1, (6, 7)).astype(np.float32):
        observation = goal_env.step(action)[0]
    model = goal_env.scene.model
    monkeypatch.setattr(VisibleGeoms, "visible_geoms", lambda *_: np.ones(model.ngeom, bool))
    everything = goal_env._cameras.draw(goal_env.scene.reading.drawn, tuple(CAMERAS.values()))
    np.testing.assert_array_equal(everything, [observation[name] for name in CAMERAS])


def test_the_camera_in_the_hand_sees_the_fingers_and_neither_the_mount_nor_the_shoulder(
    object_env: LiberoEnv,
) -> None:
    object_env.reset(options={"init_state_id": 0})
    mujoco, model = load_simulator().mujoco, object_env.scene.model
    camera = mujoco.mj_name2id(model, mujoco.mjtObj.mjOBJ_CAMERA, CAMERAS["wrist_image"])
    seen = VisibleGeoms(model, DRAWN_GROUPS).visible_geoms(camera, object_env.scene.reading.drawn)
    bodies = {model.body(model.geom_bodyid[geom]).name for geom in np.flatnonzero(seen)}
    assert {"gripper0_leftfinger", "gripper0_rightfinger"} <= bodies
    assert not {"mount0_base", "robot0_link0", "robot0_link1", "robot0_link2"} & bodies


def test_the_box_of_each_mesh_holds_its_corners(goal_env: LiberoEnv) -> None:
    model = goal_env.scene.model
    meshes = np.flatnonzero(model.geom_type == load_simulator().mujoco.mjtGeom.mjGEOM_MESH)
    for geom in meshes:
        mesh = model.geom_dataid[geom]
        first = model.mesh_vertadr[mesh]
        corners = model.mesh_vert[first : first + model.mesh_vertnum[mesh]]
        assert (
            np.abs(corners - model.geom_aabb[geom, :3]) <= model.geom_aabb[geom, 3:] + 1e-5
        ).all()
    assert len(meshes) > 50
