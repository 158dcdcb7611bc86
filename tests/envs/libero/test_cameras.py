"""Cameras of an OpenGL context that was lost: an error, and never the picture of other memory."""

import gc
import os

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv
from vla_rl.errors import EnvError


def test_an_error_that_opengl_reports_after_drawing_is_raised(object_env: LiberoEnv) -> None:
    before = object_env.reset(options={"init_state_id": 0})[0]["image"]
    from OpenGL.platform import PLATFORM  # bound to EGL or OSMesa by the first picture

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
