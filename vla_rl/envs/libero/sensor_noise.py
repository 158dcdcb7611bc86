"""LIBERO-plus's noise in the picture of the fixed camera: motion, Gaussian and zoom blur, fog and
glass, ten strengths each.

The installed package's `ControlEnv` adds the noise to an observation, so it is given one with our
picture. It draws from NumPy's global generator, which is seeded here, so that an episode looks the
same in every process.
"""

import types
from typing import Any

import numpy as np

from vla_rl.envs.libero.building import seeded
from vla_rl.envs.libero.libero_code import load_libero
from vla_rl.errors import EnvError

NOISE_SIZE = 256
"""Side in pixels of the pictures that LIBERO-plus's fog and glass are made for."""


def add_noise(package: str, picture: np.ndarray, noise: int, seed: int) -> np.ndarray:
    """Return the picture, uint8 [S, S, 3] as policies see it, with LIBERO-plus's noise 1 to 50.

    Raises: `EnvError` if the package adds no noise, or cannot add it to such a picture.
    """
    wrapper = load_libero(package).wrapper
    if not hasattr(wrapper, "motion_blur"):
        raise EnvError(
            f"the task has noise in its pictures, but the installed {package} adds none; install "
            "LIBERO-plus."
        )
    if not isinstance(wrapper.np, _OldNumPy):
        wrapper.np = _OldNumPy("numpy")
    control = object.__new__(wrapper.ControlEnv)
    control.env, control.noise = _Camera(np.ascontiguousarray(picture[::-1, ::-1])), noise
    try:
        with seeded(seed):
            observation = control.step(None)[0]
    except (ValueError, IndexError) as error:  # fog and glass support one picture size only
        raise EnvError(
            f"LIBERO-plus cannot add its noise {noise} to a picture of {len(picture)} pixels "
            f"({error}); set "
            f"image_size={NOISE_SIZE}."
        ) from error
    noisy = np.asarray(observation["agentview_image"], np.uint8)
    return np.ascontiguousarray(noisy[::-1, ::-1])


class _Camera:
    """An environment that only returns a picture, with robosuite's order of rows."""

    def __init__(self, picture: np.ndarray) -> None:
        self._picture = picture

    def step(self, _action: object) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        return {"agentview_image": self._picture}, 0.0, False, {}


class _OldNumPy(types.ModuleType):
    """NumPy with two names that LIBERO-plus uses and NumPy 2 has removed."""

    float_ = np.float64

    @staticmethod
    def fromstring(data: bytes, dtype: Any) -> np.ndarray:
        return np.frombuffer(data, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
