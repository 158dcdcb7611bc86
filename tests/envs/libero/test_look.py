"""The quality "fast": a plainer picture of the same scene, and nothing left of it in the model
afterwards.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv, scene

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


def test_a_fast_picture_shows_the_same_scene_with_a_plainer_robot(
    object_env: LiberoEnv, fast_env: LiberoEnv
) -> None:
    exact, _ = object_env.reset(options={"init_state_id": 3})
    fast, info = fast_env.reset(options={"init_state_id": 3})
    assert (info["physics"], info["quality"]) == ("fast", "fast")
    for camera in ("image", "wrist_image"):
        difference = np.abs(exact[camera].astype(int) - fast[camera]).max(axis=2)
        # edges and the robot; the floor and the objects are the same
        assert 0.0 < (difference > 40).mean() < 0.15
    # the robot is in the picture: bright pixels in the upper half, where the hand is in both
    hand = exact["image"][:48, 30:66].mean()
    assert abs(fast["image"][:48, 30:66].mean() - hand) < 0.25 * hand


def test_a_closed_environment_leaves_the_kept_model_as_it_was(
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


def test_the_cameras_of_a_kept_scene_serve_the_next_environment_that_draws_the_same(
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
