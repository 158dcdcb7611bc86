"""Cameras of an OpenGL context that was lost: an error, and never the picture of other memory."""

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
