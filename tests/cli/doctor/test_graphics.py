"""A machine that cannot draw is named: each test makes one fault happen."""

import re
from pathlib import Path

import pytest
from faults import PATIENT, words, write_module

from vla_rl.cli.doctor.graphics import opengl_that_draws


def test_a_driver_that_cannot_draw_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "63")
    found = words(opengl_that_draws(PATIENT))
    assert re.search(r"no picture can be drawn \(.*63", found)
    assert "apt-get install" in found


def test_opengl_that_every_python_opens_at_its_start_is_named(
    first_on_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not words(opengl_that_draws(PATIENT)), "a fork of this machine draws"
    # drawn and closed: the driver's threads stay, and a fork lacks them
    write_module(
        first_on_path, "sitecustomize", "from vla_rl.cli.doctor.drawing import draw\ndraw()\n"
    )
    found = words(opengl_that_draws(PATIENT))
    assert "a forked process cannot draw" in found
    assert "sitecustomize.py" in found
