"""`LiberoEnv`: one task of LIBERO as a plain, synchronous gymnasium environment.

The visual meshes of the Panda and its mount alone have 168 000 triangles, a multiple of everything
else on a table of placeholder assets. The plain robot of the quality "fast" is its collision meshes
in the robot's colours.

LIBERO-plus adds noise to the image of the fixed camera: motion, Gaussian and zoom blur, fog and
glass, ten strengths each. The installed package's `ControlEnv` adds it to an observation, so it is
given one with our image. It draws from NumPy's global generator, which is seeded here, so that an
episode looks the same in every process.
"""

import os
import types
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from gymnasium import spaces

from vla_rl.envs.experts import ExpertSuggestions
from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.envs.image_env import Expert, ImageEnv, require_at_least, require_choice
from vla_rl.envs.libero.assets import find_package_assets
from vla_rl.envs.libero.building import seeded
from vla_rl.envs.libero.loading import load_libero
from vla_rl.envs.libero.scene import (
    CameraKey,
    Scene,
    SceneKey,
    prepare_scene,
    release_cameras,
    release_scene,
    take_cameras,
    take_scene,
)
from vla_rl.envs.libero.stepping import Physics
from vla_rl.envs.libero.task_files import read_init_states
from vla_rl.envs.libero.tasks import Task, find_task, get_step_limit, read_other_goals
from vla_rl.envs.mujoco.cameras import Cameras, Orientation
from vla_rl.envs.mujoco.drawing_quality import HIDDEN_GROUP, Look, Quality, Style
from vla_rl.envs.mujoco.loading import load_mujoco
from vla_rl.errors import EnvError
from vla_rl.types import Info, derive_seed

Scenes: TypeAlias = Literal["same", "published"]
"""same: LIBERO's first reset after the seed places the fixtures of every episode, as if each had
its own environment (SimpleVLA-RL). published: one environment runs all trials of a task, so that
trial k, from the initial state k, has the fixtures of the k-th reset after the first (OpenVLA,
OpenVLA-OFT, openpi).
"""

CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
"""LIBERO's camera for each image of the observation."""

IDLE_ACTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""Holds the hand in place and the gripper open; the settle steps run it."""

_STATE_BOUND = np.array([3.0] * 3 + [6.3] * 3 + [0.1] * 2, np.float32)
_INSTRUCTION_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,'"


class LiberoEnv(ImageEnv[Scene]):
    """A Panda arm on one LIBERO task, 20 control steps a second.

    Observation:
        image: uint8 [S, S, 3], RGB, the fixed camera ("agentview").
        wrist_image: uint8 [S, S, 3], RGB, the camera in the hand; absent if `wrist_image` is False.
        state: float32 [8], world frame: gripper position x, y, z (m), hand orientation as axis
            times angle (rad), the two finger joints (m, about 0.04 and -0.04 when open).
        instruction: str, the task in words.
    Both images are OpenGL's turned by 180 degrees: upright, left and right exchanged, as the
    published policies see them.
    Action: float32 [7] in [-1, 1]: hand displacement x, y, z (1 is 5 cm), rotation vector (1 is
        0.5 rad), gripper (its sign counts: above 0 closes, below 0 opens).
    Reward: 1.0 at the control step at which the goal first holds, which ends the episode
        (terminated); else 0.0.
    Truncated: after `step_limit` control steps.
    Info: task, init_state_id, scene_seed, num_steps (control steps so far), is_success, and
        settings of the results: scenes, physics, quality, assets; for a variant of LIBERO-plus or
        LIBERO-PRO also perturbation, the change.

    The start is fixed by (task, init_state_id, scene_seed, scenes, after_task) and nothing else.
    `reset(options={"init_state_id": k})` takes the k-th of LIBERO's fixed initial states; without
    it the seed picks one. A k beyond the last of them is a start of our own, drawn from the task's
    regions with the seed k, including fixtures (`drawn_starts`).

    Args:
        suite, task_id: the task, in LIBERO's own order; name a suite of another package with the
            package, such as `liberopro.libero_goal_swap`.
        assets: folder of LIBERO's assets or "stand-ins"; None for the first that `find_assets`
            finds.
        image_size: S, in pixels.
        step_limit: control steps after which the episode is truncated; None for the suite's
            published limit. (`gymnasium.make` keeps the name max_episode_steps for a wrapper that
            cannot lift a limit.)
        num_settle_steps: idle control steps in `reset`, not counted, in which objects settle.
        scene_seed: seed of the fixtures' poses, which LIBERO's initial states do not contain.
        scenes: "same" places the fixtures alike in every episode; "published" anew for each initial
            state, as in published evaluations.
        wrist_image: False omits the camera in the hand, for policies that do not use it.
        render_mode: "rgb_array" or None; images are in the observation either way.
        render_key: key of the image that `render` returns, which also gives the frames of a
            chunk.
        physics: "exact" computes robosuite's bits, "fast" the same up to rounding in half the time.
        after_task: number of a task of the suite, in the same scene, whose scripted expert acts first: an episode
            begins when that task is solved and the hand is home again. None: nothing acts before the episode.
        quality: "exact" draws robosuite's pixels, "fast" without multisampling, with a plainer
            robot, and without detail that images of this size cannot show.

    OpenGL is opened at the first image, so that a process that has made an environment can still
    fork.

    Raises: `ValueError` for an unknown suite or a task id out of range; `FileNotFoundError` without
        assets or files of the task; `ImportError` without LIBERO; `EnvError` with another MuJoCo,
        and at the first image without OpenGL; `StartError` at a reset to a start that `after_task` does not have.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20, "robot_type": "panda"}  # noqa: RUF012 - as gymnasium declares it
    recorded_in_states = ("scene_seed", "scenes", "physics", "quality", "assets")
    displacements = (1.0, 1.0, 1.0, 0.3, 0.3, 0.3)

    def __init__(
        self,
        suite: str = "",
        task_id: int = 0,
        assets: str | os.PathLike[str] | None = None,
        image_size: int = 224,
        step_limit: int | None = None,
        num_settle_steps: int = 10,
        scene_seed: int = 0,
        scenes: Scenes = "same",
        wrist_image: bool = True,
        render_mode: str | None = "rgb_array",
        render_key: str = "image",
        physics: Physics = "exact",
        quality: Quality = "exact",
        after_task: int | None = None,
    ) -> None:
        self.task: Task = find_task(suite, task_id)
        self._other_goals = [] if after_task is None else read_other_goals(self.task, after_task)
        require_choice("scenes", scenes, get_args(Scenes))
        require_choice("physics", physics, get_args(Physics))
        require_choice("quality", quality, get_args(Quality))
        require_at_least("image_size", image_size, 16)
        require_at_least("num_settle_steps", num_settle_steps, 0)
        require_at_least("scene_seed", scene_seed, 0)
        self._image_size, self._num_settle_steps = image_size, num_settle_steps
        self._init_states = read_init_states(self.task.init_states_file)
        super().__init__(
            self.task,
            tuple(name for name in CAMERAS if wrist_image or name != "wrist_image"),
            len(self._init_states),
            get_step_limit(suite) if step_limit is None else step_limit,
            render_mode,
            render_key,
        )
        found = find_package_assets(self.task.package, assets)
        self._scene_key = SceneKey(self.task, found.path, scene_seed)
        self._scene: Scene | None = take_scene(self._scene_key)
        # A prepared scene may come from an environment with the other physics.
        self._scene.physics = physics
        self._cameras: Cameras | None = None
        self._scenes, self._quality = scenes, quality
        self._recorded: Info = {
            "scenes": scenes,
            "physics": physics,
            "quality": quality,
            "assets": found.source,
        }
        if after_task is not None:
            self._recorded["after_task"] = after_task
        if self.task.perturbation:
            self._recorded["perturbation"] = self.task.perturbation
        self.observation_space = self._make_observation_space()
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    def _make_observation_space(self) -> spaces.Dict:
        image = spaces.Box(0, 255, (self._image_size, self._image_size, 3), np.uint8)
        return spaces.Dict(
            {
                **dict.fromkeys(self._image_keys, image),
                "state": spaces.Box(-_STATE_BOUND, _STATE_BOUND, dtype=np.float32),
                "instruction": _instruction_space(self.task.instruction),
            }
        )

    @classmethod
    def prepare(
        cls,
        suite: str,
        task_id: int = 0,
        assets: str | os.PathLike[str] | None = None,
        scene_seed: int = 0,
        image_size: int = 224,
        quality: Quality = "exact",
        **_of_each_env: object,
    ) -> None:
        """Build the scene of such an environment and keep it in this process, without OpenGL.

        An environment that is made later with the same keywords, here or in a forked child, uses it
        instead of building one. One environment uses it at a time; closing it leaves the scene for
        the next. Other keywords are ignored.
        """
        task = find_task(suite, task_id)
        key = SceneKey(task, find_package_assets(task.package, assets).path, scene_seed)
        # Simplifying meshes takes 0.7 to 2.5 s a scene: once here, instead of in each fork.
        look = Look(prepare_scene(key).model, image_size, quality, LIBERO_STYLE)
        look.simplify_meshes()
        look.undo_changes()

    def open_graphics(self) -> None:
        """Open OpenGL now instead of at the first image, in a process that will not fork.

        Raises: `EnvError`.
        """
        if self._cameras is None:
            # OpenGL's rows run from the bottom up, and published policies saw images turned by 180
            # degrees. Both together mirror an image.
            cameras: dict[str, Orientation] = {
                CAMERAS[name]: "mirrored" for name in self._image_keys
            }
            self._camera_key = CameraKey.of_this_thread(
                tuple(cameras), self._image_size, self._quality
            )
            self._cameras = take_cameras(self._scene_key, self.scene, self._camera_key) or Cameras(
                self.scene.model, cameras, self._image_size, self._quality, LIBERO_STYLE
            )

    def make_expert(self) -> Expert:
        """Return the scripted expert of the task."""
        # here, because simulators of a policy's own episodes need none of the experts' programs
        from vla_rl.envs.libero.experts.expert import Expert as LiberoExpert

        return LiberoExpert(self.scene)

    def close(self) -> None:
        """Free the simulation and the OpenGL context, or leave those of a prepared scene to the next
        environment; a second call does nothing.
        """
        if self._scene is not None:
            if self._cameras is not None:
                release_cameras(self._scene_key, self._scene, self._camera_key, self._cameras)
            release_scene(self._scene_key, self._scene)
            self._scene = None

    def _begin(self, init_state_id: int) -> None:
        scene = self.scene
        if init_state_id < len(self._init_states):
            # Initial states do not hold the poses of fixtures: cabinet and stove stand 11 to 18 mm
            # apart between two resets.
            reset_number = init_state_id if self._scenes == "published" else 0
            scene.start_episode(self._init_states[init_state_id], reset_number)
        else:
            scene.start_drawn_episode(init_state_id)
        # LIBERO's initial states are not at rest: in libero_object, things float up to 16 cm above
        # the floor.
        for _ in range(self._num_settle_steps):
            scene.run_control_step(np.array(IDLE_ACTION))
        if self._other_goals:
            self._run_other_skill()

    def _run_other_skill(self) -> None:
        from vla_rl.envs.libero.experts.expert import start_after

        start_after(self.scene, self.task, self._other_goals)

    def _draw_now(self, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        self.open_graphics()
        assert self._cameras is not None
        images = self._cameras.draw(
            self.scene.reading.drawn, tuple(CAMERAS[name] for name in names)
        )
        noise = self.task.variant.noise
        if noise == 0:
            return images
        # Each image has a seed of its own, so that an episode that is run again elsewhere has the
        # same noise.
        seed = derive_seed(self._init_state_id, self.task.key, self._num_steps) % (1 << 32)
        return tuple(
            _add_noise(self.task.package, image, noise, seed) if name == "image" else image
            for name, image in zip(names, images, strict=True)
        )

    def _vector(self) -> np.ndarray:
        return self.scene.reading.proprio

    def _settings(self) -> Info:
        return {"scene_seed": self._scene_key.scene_seed, **self._recorded}


def _instruction_space(instruction: str) -> Words:
    """Return the same space for every task of LIBERO.

    Variants have longer instructions with other characters.
    """
    # A vector environment refuses environments whose spaces differ.
    others = "".join(sorted(set(instruction) - set(_INSTRUCTION_CHARACTERS)))
    return Words(max(256, len(instruction)), charset=_INSTRUCTION_CHARACTERS + others)


def make_suggesting_env(expert_rows: int | None = None, **kwargs: Any) -> ExpertSuggestions:
    """Make an environment `vla_rl/<suite>-expert-v0`.

    `expert_rows` is that of `ExpertSuggestions`; other keywords are those of `LiberoEnv`. gymnasium's entry
    point.
    """
    return ExpertSuggestions(LiberoEnv(**kwargs), expert_rows)


_ROBOT_PREFIXES = ("robot0_", "gripper0_", "mount0_")
_COLLISION_GROUP, _VISUAL_GROUP = 0, 1
DRAWN_GROUPS = (0, 1, 1, 0, 0, 0)
"""Visible groups of geoms: all that MuJoCo shows by default except the collision shapes."""

_LIGHT_RGBA, _DARK_RGBA = (0.93, 0.93, 0.94, 1.0), (0.22, 0.23, 0.26, 1.0)
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
        model.geom_rgba[geom] = _DARK_RGBA if is_dark else _LIGHT_RGBA


LIBERO_STYLE = Style(DRAWN_GROUPS, draw_panda_plainly, has_fine_detail=True)


_NOISE_IMAGE_SIZE = 256
"""Side in pixels of the images that LIBERO-plus's fog and glass are made for."""


def _add_noise(package: str, image: np.ndarray, noise: int, seed: int) -> np.ndarray:
    """Return the image, uint8 [S, S, 3] as policies see it, with LIBERO-plus's noise 1 to 50.

    Raises: `EnvError` if the package adds no noise, or cannot add it to such an image.
    """
    wrapper = load_libero(package).wrapper
    if not hasattr(wrapper, "motion_blur"):
        raise EnvError(
            f"the task has noise in its images, but the installed {package} adds none; install "
            "LIBERO-plus."
        )
    if not isinstance(wrapper.np, _NumPy1):
        wrapper.np = _NumPy1("numpy")
    control = object.__new__(wrapper.ControlEnv)
    control.env, control.noise = _ImageOnlyEnv(np.ascontiguousarray(image[::-1, ::-1])), noise
    try:
        with seeded(seed):
            observation = control.step(None)[0]
    # LIBERO-plus wrote its fog and glass for images of one size.
    except (ValueError, IndexError) as error:
        raise EnvError(
            f"LIBERO-plus cannot add its noise {noise} to an image of {len(image)} pixels "
            f"({error}); set "
            f"image_size={_NOISE_IMAGE_SIZE}."
        ) from error
    noisy = np.asarray(observation["agentview_image"], np.uint8)
    return np.ascontiguousarray(noisy[::-1, ::-1])


class _ImageOnlyEnv:
    """An environment that only returns an image, with robosuite's order of rows."""

    def __init__(self, image: np.ndarray) -> None:
        self._image = image

    def step(self, _action: object) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        return {"agentview_image": self._image}, 0.0, False, {}


class _NumPy1(types.ModuleType):
    """NumPy with two names that LIBERO-plus uses and NumPy 2 has removed."""

    float_ = np.float64

    @staticmethod
    def fromstring(data: bytes, dtype: Any) -> np.ndarray:
        return np.frombuffer(data, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
