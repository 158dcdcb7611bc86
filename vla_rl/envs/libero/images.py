"""Look of LIBERO's images: the geoms that are drawn, the plain Panda, the noise.

The visual meshes of the Panda and its mount alone have 168 000 triangles, a multiple of everything
else on a table of placeholder assets. The plain robot of the quality "fast" is its collision meshes
in the robot's colours.

LIBERO-plus adds noise to the image of the fixed camera: motion, Gaussian and zoom blur, fog and
glass, ten strengths each. The installed package's `ControlEnv` adds it to an observation, so it is
given one with our image. It draws from NumPy's global generator, which is seeded here, so that an
episode looks the same in every process.
"""

import types
from typing import Any

import numpy as np

from vla_rl.envs.libero.building import seeded
from vla_rl.envs.libero.loading import load_libero
from vla_rl.envs.mujoco.drawing_quality import HIDDEN_GROUP, Style
from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.errors import EnvError

_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
DRAWN_GROUPS = (0, 1, 1, 0, 0, 0)
"""Visible groups of geoms: all that MuJoCo shows by default except the collision shapes."""

_LIGHT, _DARK = (0.93, 0.93, 0.94, 1.0), (0.22, 0.23, 0.26, 1.0)
_DARK_PARTS = ("link1", "link3", "link5", "link7", "finger", "mount")


def draw_panda_plainly(model: Any) -> None:
    """Show the robot's collision shapes instead of its visual meshes."""
    mujoco = load_mujoco()
    for geom in range(model.ngeom):
        body = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_BODY, model.geom_bodyid[geom]) or ""
        if not body.startswith(_ROBOT_PREFIXES):
            continue
        if model.geom_group[geom] != _COLLISION_GROUP:
            model.geom_group[geom] = HIDDEN_GROUP
            continue
        name = mujoco.mj_id2name(model, mujoco.mjtObj.mjOBJ_GEOM, geom) or ""
        is_dark = any(part in body or part in name for part in _DARK_PARTS)
        model.geom_group[geom] = _VISUAL_GROUP
        model.geom_matid[geom] = -1
        model.geom_rgba[geom] = _DARK if is_dark else _LIGHT


LIBERO_STYLE = Style(DRAWN_GROUPS, draw_panda_plainly, has_fine_detail=True)


NOISE_SIZE = 256
"""Side in pixels of the images that LIBERO-plus's fog and glass are made for."""


def add_noise(package: str, image: np.ndarray, noise: int, seed: int) -> np.ndarray:
    """Return the image, uint8 [S, S, 3] as policies see it, with LIBERO-plus's noise 1 to 50.

    Raises: `EnvError` if the package adds no noise, or cannot add it to such an image.
    """
    wrapper = load_libero(package).wrapper
    if not hasattr(wrapper, "motion_blur"):
        raise EnvError(
            f"the task has noise in its images, but the installed {package} adds none; install "
            "LIBERO-plus."
        )
    if not isinstance(wrapper.np, _OldNumPy):
        wrapper.np = _OldNumPy("numpy")
    control = object.__new__(wrapper.ControlEnv)
    control.env, control.noise = _Camera(np.ascontiguousarray(image[::-1, ::-1])), noise
    try:
        with seeded(seed):
            observation = control.step(None)[0]
    except (ValueError, IndexError) as error:  # fog and glass support one image size only
        raise EnvError(
            f"LIBERO-plus cannot add its noise {noise} to an image of {len(image)} pixels "
            f"({error}); set "
            f"image_size={NOISE_SIZE}."
        ) from error
    noisy = np.asarray(observation["agentview_image"], np.uint8)
    return np.ascontiguousarray(noisy[::-1, ::-1])


class _Camera:
    """An environment that only returns an image, with robosuite's order of rows."""

    def __init__(self, image: np.ndarray) -> None:
        self._image = image

    def step(self, _action: object) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        return {"agentview_image": self._image}, 0.0, False, {}


class _OldNumPy(types.ModuleType):
    """NumPy with two names that LIBERO-plus uses and NumPy 2 has removed."""

    float_ = np.float64

    @staticmethod
    def fromstring(data: bytes, dtype: Any) -> np.ndarray:
        return np.frombuffer(data, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
