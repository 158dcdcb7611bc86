"""`MetaWorldEnv`: one task of Meta-World as a plain, synchronous gymnasium environment.

Its models are drawn with MuJoCo's default groups of geoms, and with a plain Sawyer in the quality
"fast". The Sawyer's meshes have 67 000 triangles, and a scene hardly any others. Most of its links
have no collision shapes that could be drawn instead, so the plain robot has coarse meshes.
"""

import copy
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, get_args

import numpy as np
from gymnasium import spaces

from vla_rl.envs.experts import ExpertSuggestions
from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.envs.image_env import Expert, ImageEnv, require_at_least, require_choice
from vla_rl.envs.metaworld.scene import Scene, load_metaworld
from vla_rl.envs.metaworld.tasks import STEP_LIMIT, Task, find_task
from vla_rl.envs.mujoco.cameras import Cameras, Orientation
from vla_rl.envs.mujoco.drawing_quality import Quality, Style
from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.envs.mujoco.meshes import make_coarse
from vla_rl.types import Info

CAMERAS: Final = MappingProxyType({"image": "corner2", "wrist_image": "gripperPOV"})
"""Meta-World's camera for each image of the observation."""

_ORIENTATIONS: Final[Mapping[str, Orientation]] = MappingProxyType(
    # Meta-World mounts its camera corner2 upside down.
    {"image": "turned", "wrist_image": "upright"}
)
_STATE_LOW: Final = np.array([-0.525, 0.348, -0.0525, 0.0], np.float32)
_STATE_HIGH: Final = np.array([0.525, 1.025, 0.7, 1.0], np.float32)
_INSTRUCTION_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ,-"


class MetaWorldEnv(ImageEnv[Scene]):
    """A Sawyer arm on one Meta-World task, 80 control steps a second.

    Observation:
        image: uint8 [S, S, 3], RGB, the fixed camera ("corner2", upright).
        wrist_image: uint8 [S, S, 3], RGB, the camera in the gripper; absent if `wrist_image` is
            False.
        state: float32 [4], the hand's position x, y, z (m, world) and the opening of the gripper,
            0 to 1.
        instruction: str, the task in words.
    Action: float32 [4] in [-1, 1]: hand displacement x, y, z (1 is 1 cm) and the gripper's effort
        (1 closes, -1 opens).
    Reward: 1.0 at the control step where the task is first solved, which ends the episode
        (terminated); else 0.0. Truncated: after `step_limit` control steps.
    Info: task, init_state_id, num_steps (control steps so far), is_success, dense_reward
        (Meta-World's own reward of the step), and the setting quality.

    The start is fixed by (task, init_state_id) and nothing else. `reset(options={"init_state_id":
    k})` takes start k, which is drawn from the task's ranges by a generator that the task and k
    seed; without it the seed picks one of the first 50.

    Args:
        suite: metaworld_mt10 or metaworld_mt50.
        task_id: position of the task in the suite, or its name, such as `drawer-open`.
        image_size: S, in pixels.
        step_limit: control steps after which the episode is truncated; None for Meta-World's 500.
        wrist_image: False omits the camera in the gripper, for policies that do not use it.
        render_mode: "rgb_array" or None; images are in the observation either way.
        render_key: key of the image that `render` returns, which also gives the frames of a
            chunk.
        quality: "exact" draws the pixels of Meta-World's own renderer, "fast" draws without
            multisampling and shadows and with a plainer robot.

    OpenGL is opened at the first image, so that a process that has made an environment can still
    fork.

    Raises: `ValueError` for an unknown suite or task; `ImportError` without Meta-World; `EnvError`
        for another version of it, and at the first image without OpenGL.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80, "robot_type": "sawyer"}  # noqa: RUF012 - as gymnasium declares it
    recorded_in_states = ("quality",)
    displacements = (1.0, 1.0, 1.0)

    def __init__(
        self,
        suite: str = "metaworld_mt50",
        task_id: int | str = 0,
        image_size: int = 224,
        step_limit: int | None = None,
        wrist_image: bool = True,
        render_mode: str | None = "rgb_array",
        render_key: str = "image",
        quality: Quality = "exact",
    ) -> None:
        self.task: Task = find_task(suite, task_id)
        require_choice("quality", quality, get_args(Quality))
        require_at_least("image_size", image_size, 16)
        super().__init__(
            self.task,
            tuple(name for name in CAMERAS if wrist_image or name != "wrist_image"),
            self.task.num_init_states,
            STEP_LIMIT if step_limit is None else step_limit,
            render_mode,
            render_key,
        )
        self._scene: Scene | None = Scene(self.task)
        self._cameras: Cameras | None = None
        self._image_size, self._quality = image_size, quality
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                **dict.fromkeys(self._image_keys, image),
                "state": spaces.Box(_STATE_LOW, _STATE_HIGH, dtype=np.float32),
                "instruction": Words(256, charset=_INSTRUCTION_CHARACTERS),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    @classmethod
    def prepare(cls, **_of_each_env: object) -> None:
        """Import Meta-World without OpenGL, so that forks of this process share its code."""
        load_metaworld()

    def open_graphics(self) -> None:
        """Open OpenGL now instead of at the first image, in a process that will not fork.

        Raises: `EnvError`.
        """
        if self._cameras is None:
            # a copy, so that nothing that drawing changes can reach the physics
            model = copy.copy(self.scene.model)
            cameras = {CAMERAS[name]: _ORIENTATIONS[name] for name in self._image_keys}
            self._cameras = Cameras(
                model, cameras, self._image_size, self._quality, METAWORLD_STYLE
            )

    def make_expert(self) -> Expert:
        """Return Meta-World's scripted policy of the task."""
        return MetaWorldExpert(self.scene)

    def close(self) -> None:
        """Free the simulation and the OpenGL context; a second call does nothing."""
        if self._scene is not None:
            if self._cameras is not None:
                self._cameras.close()
            self._scene.close()
            self._scene = None

    def _begin(self, init_state_id: int) -> None:
        self.scene.start_episode(init_state_id)

    def _draw_now(self, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        self.open_graphics()
        assert self._cameras is not None
        return self._cameras.draw(self.scene.drawn, tuple(CAMERAS[name] for name in names))

    def _vector(self) -> np.ndarray:
        return self.scene.observation[:4].astype(np.float32)

    def _settings(self) -> Info:
        return {"quality": self._quality, "dense_reward": self.scene.dense_reward}


def make_suggesting_env(expert_rows: int | None = None, **kwargs: Any) -> ExpertSuggestions:
    """Make an environment `vla_rl/<suite>-expert-v0`.

    `expert_rows` is that of `ExpertSuggestions`; other keywords are those of `MetaWorldEnv`. gymnasium's entry
    point.
    """
    return ExpertSuggestions(MetaWorldEnv(**kwargs), expert_rows)


_CELL_M: Final = 0.025
"""Finer cells cost more, coarser ones break the outline of the arm."""


def draw_sawyer_plainly(model: Any) -> None:
    """Simplify the meshes of the robot, which share the root of its hand; objects stay exact."""
    is_mesh = model.geom_type == load_mujoco().mjtGeom.mjGEOM_MESH
    robot = model.body_rootid[model.body("hand").id]
    is_robot = model.body_rootid[model.geom_bodyid] == robot
    make_coarse(model, np.unique(model.geom_dataid[is_mesh & is_robot]), _CELL_M)


METAWORLD_STYLE = Style((1, 1, 1, 0, 0, 0), draw_sawyer_plainly, has_fine_detail=False)


class MetaWorldExpert:
    """Solves the task of one scene by Meta-World's own program; it has no memory."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._policy: Any = load_metaworld().experts[f"{scene.task_name}-v3"]()

    def start_over(self) -> None:
        """Do nothing: the program reads where everything is at each step."""

    def start_midway(self) -> None:
        """Do nothing, as `start_over`."""

    def act(self) -> np.ndarray:
        """Return the action for the current scene, float32 [4]."""
        with warnings.catch_warnings():
            # that a displacement is above 1, which Meta-World clips
            warnings.simplefilter("ignore", UserWarning)
            action = self._policy.get_action(self._scene.observation)
        return np.asarray(np.clip(action, -1.0, 1.0), np.float32)

    @property
    def obstacle(self) -> str | None:
        """None: these programs do not know why they fail."""
        return None
