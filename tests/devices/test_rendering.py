"""The campaign's stage of images: every EGL device draws what the CPU draws, and one that cannot is
named."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.campaign import rendering
from benchmarks.gpu.campaign.page import GOALS
from vla_rl.errors import ConfigError

needs_mujoco = pytest.mark.skipif(find_spec("mujoco") is None, reason="needs MuJoCo")


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return SimpleNamespace(is_tiny=True, folder=tmp_path)


@needs_mujoco
def test_every_egl_device_draws_what_the_cpu_draws(target: Any) -> None:
    found: dict[str, Any] = dict(rendering.measure(target))
    devices = [figures for name, figures in found.items() if name.startswith("egl")]
    drawn = [figures for figures in devices if "apart" in figures]
    if not drawn or "fault" in found["osmesa"]:
        pytest.skip(f"this machine draws in one way only: {found}")
    (goal,) = (goal for goal in GOALS if goal.stage == "rendering")
    for figures in drawn:
        assert figures["1"] > 0.0
        assert goal.is_met(figures["apart"])


@needs_mujoco
def test_an_egl_device_that_is_not_there_is_named(target: Any) -> None:
    chosen = {"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "63"}
    assert "egl" in str(rendering.figures(target, chosen, "egl-63")["fault"])
    assert not list(target.folder.iterdir())


def test_images_are_compared_by_their_pixels(target: Any) -> None:
    cpu, gpu = np.full((10, 10, 3), 100, np.uint8), np.full((10, 10, 3), 100, np.uint8)
    gpu[0, 0] = (100, 100, 140)  # one pixel of a hundred, in one of its colours
    gpu[1, 1] = (90, 100, 100)  # and one that is smoothed otherwise
    for name, image in (("osmesa", cpu), ("egl-0", gpu)):
        np.save(target.folder / f"image-{name}.npy", image)
    found = rendering.differences(target, "egl-0")
    assert found == pytest.approx({"difference": 50 / 300, "apart": 0.01})
    assert rendering.differences(target, "egl-1") == {}


def test_without_a_simulator_no_image_is_drawn(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="MuJoCo is not installed"):
        dict(rendering.measure(target))
