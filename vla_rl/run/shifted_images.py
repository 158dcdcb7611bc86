"""Random shifts of images in training batches, so that few demonstrations are not learnt by heart.

Each image is moved by up to some pixels along both axes; its edge fills what becomes free (Kostrikov et
al. 2020, arXiv:2004.13649). It suits any policy, because it comes before the policy's own preparation.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vla_rl.types import Observation


class Preparing(Protocol):
    """A policy that prepares observations of some cameras."""

    @property
    def config(self) -> Any: ...
    def prepare(self, observations: Sequence[Observation]) -> Any: ...


def shift_image(image: np.ndarray, down: int, right: int) -> np.ndarray:
    """Move an image [H, W, 3] by some pixels; negative numbers move it up or to the left."""
    most = max(abs(down), abs(right))
    padded = np.pad(image, ((most, most), (most, most), (0, 0)), mode="edge")
    height, width = image.shape[:2]
    top, left = most - down, most - right
    return np.ascontiguousarray(padded[top : top + height, left : left + width])


def shifted_batches(
    policy: Preparing, most: int, draws: random.Random
) -> Callable[[Sequence[Observation]], Any]:
    """Return a `policy.prepare` that shifts every image of the policy's cameras by up to `most` pixels.

    Call it in one thread, because all batches draw from `draws`.
    """

    def shift(observation: Observation) -> Observation:
        moved = {
            camera: shift_image(
                observation[camera], draws.randint(-most, most), draws.randint(-most, most)
            )
            for camera in policy.config.cameras
        }
        return {**observation, **moved}

    return lambda observations: policy.prepare([shift(each) for each in observations])


def seeded_shifts(
    policy: Preparing, settings: Mapping[str, Any]
) -> Callable[[Sequence[Observation], int], Any]:
    """Return a function that prepares observations as `shifted_batches` does, drawing from a seed.

    Args:
        policy: the policy.
        settings: `most`, in pixels.
    """
    draws = random.Random()
    prepare = shifted_batches(policy, int(settings["most"]), draws)

    def seeded(observations: Sequence[Observation], seed: int) -> Any:
        draws.seed(seed)
        return prepare(observations)

    return seeded
