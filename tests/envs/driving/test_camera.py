"""Images from the car: a crop stretches a part of the height and leaves the rest as it is."""

import cv2
import numpy as np
import pytest

from vla_rl.envs.driving.observing import FRONT
from vla_rl.envs.driving.one_decision import OpenLoopDrivingEnv


def front_image(size: int, scene: int, **options: tuple[float, float]) -> np.ndarray:
    env = OpenLoopDrivingEnv(split="held_out", cameras=(FRONT,), image_size=size, **options)
    return env.reset(options={"init_state_id": scene})[0]["image"]


@pytest.mark.parametrize("scene", [0, 3])  # with a car ahead; a curve with two lanes
def test_a_crop_is_a_part_of_the_whole_image_stretched(scene: int) -> None:
    whole = front_image(560, scene)
    part = cv2.resize(whole[196:420], (56, 56), interpolation=cv2.INTER_AREA)
    cropped = cv2.resize(
        front_image(560, scene, crop=(0.35, 0.75)), (56, 56), interpolation=cv2.INTER_AREA
    )
    difference = np.abs(part.astype(int) - cropped).max(axis=2)
    assert difference.mean() < 2.0
    assert (difference > 40).mean() < 0.01  # edges


def test_the_horizon_moves_with_the_crop() -> None:
    cropped = front_image(100, 0, crop=(0.3, 0.8))
    sky = cropped[0, 0]
    is_sky = (cropped[:, -1] == sky).all(axis=1)
    assert is_sky.argmin() == 41  # (0.5 - 0.3) / (0.8 - 0.3) of the height


@pytest.mark.parametrize("crop", [(0.6, 0.9), (0.1, 0.5), (-0.1, 1.0), (0.0, 1.1)])
def test_a_crop_without_the_horizon_is_refused(crop: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"crop is .*: the horizon is in the middle"):
        OpenLoopDrivingEnv(crop=crop)
