"""`LiberoEnv`: one task of LIBERO as a plain, synchronous gymnasium environment."""

import json
import os
from typing import Any, Final, Literal, TypeAlias, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.libero.init_states import read_init_states
from vla_rl.envs.libero.kept_scenes import SceneKey, give_back_scene, keep_scene, take_scene
from vla_rl.envs.libero.libero_code import find_assets_for
from vla_rl.envs.libero.panda_look import LIBERO_STYLE
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.sensor_noise import add_noise
from vla_rl.envs.libero.stepping import Physics
from vla_rl.envs.libero.tasks import NUM_STARTS, Task, find_task, step_limit_of
from vla_rl.envs.mujoco.cameras import Cameras, Orientation
from vla_rl.envs.mujoco.look import Quality
from vla_rl.types import Info, Observation, derive_seed

Scenes: TypeAlias = Literal["same", "published"]
"""same: LIBERO's first reset after the seed places the fixtures of every episode, as if each had
its own environment (SimpleVLA-RL). published: one environment runs all trials of a task, so that
trial k, from the initial state k, has the fixtures of the k-th reset after the first (OpenVLA,
OpenVLA-OFT, openpi).
"""

CAMERAS = {"image": "agentview", "wrist_image": "robot0_eye_in_hand"}
"""LIBERO's camera for each picture of the observation."""

IDLE_ACTION = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)
"""Holds the hand in place and the gripper open; the settle steps run it."""

_RECORDED_IN_STATES: Final = ("scene_seed", "scenes", "physics", "quality", "assets")
"""Settings that a state depends on besides its task."""

_PROPRIO_BOUND = np.array([3.0] * 3 + [6.3] * 3 + [0.1] * 2, np.float32)
_INSTRUCTION_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,'"


class LiberoEnv(gymnasium.Env[Observation, np.ndarray]):
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

    The start is fixed by (task, init_state_id, scene_seed, scenes) and nothing else.
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
        render_mode: "rgb_array" or None; pictures are in the observation either way.
        render_key: key of the picture that `render` returns, which also gives the frames of a
            chunk.
        physics: "exact" computes robosuite's bits, "fast" the same up to rounding in half the time.
        quality: "exact" draws robosuite's pixels, "fast" without multisampling and with a plainer
            robot.

    OpenGL is opened at the first picture, so that a process that has made an environment can still
    fork.

    Raises: `ValueError` for an unknown suite or a task id out of range; `FileNotFoundError` without
        assets or files of the task; `ImportError` without LIBERO; `EnvError` with another MuJoCo,
        and at the first picture without OpenGL.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20, "robot_type": "panda"}  # noqa: RUF012 - as gymnasium declares it

    def __init__(
        self,
        suite: str,
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
    ) -> None:
        self.task: Task = find_task(suite, task_id)
        self.step_limit = step_limit_of(suite) if step_limit is None else step_limit
        _refuse_other("scenes", scenes, get_args(Scenes))
        _refuse_other("physics", physics, get_args(Physics))
        _refuse_other("quality", quality, get_args(Quality))
        _refuse_below("image_size", image_size, 16)
        _refuse_below("step_limit", self.step_limit, 1)
        _refuse_below("num_settle_steps", num_settle_steps, 0)
        _refuse_below("scene_seed", scene_seed, 0)
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}, expected 'rgb_array' or None.")
        self.render_mode = render_mode
        self.render_every_step = True
        """False skips the pictures of a step, unless the episode ends there; the previous ones are
        returned again."""

        self._image_size, self._num_settle_steps = image_size, num_settle_steps
        self._init_states = read_init_states(self.task.init_states_file)
        self._pictures = tuple(name for name in CAMERAS if wrist_image or name != "wrist_image")
        _refuse_other("render_key", render_key, self._pictures)
        self.render_key = render_key
        """Key of the picture that `render` returns."""

        found = find_assets_for(self.task.package, assets)
        self._scene_key = SceneKey(self.task, found.path, scene_seed)
        self._scene: Scene | None = take_scene(self._scene_key)
        self._scene.physics = physics
        self._cameras: Cameras | None = None
        self._scenes, self._quality = scenes, quality
        self._recorded: Info = {
            "scenes": scenes,
            "physics": physics,
            "quality": quality,
            "assets": found.source,
        }
        if self.task.perturbation:
            self._recorded["perturbation"] = self.task.perturbation
        self._num_steps, self._is_success, self._is_over = 0, False, True
        self._init_state_id = -1
        self._images: tuple[np.ndarray, ...] = ()
        self._images_are_new = False
        image = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                **dict.fromkeys(self._pictures, image),
                "state": spaces.Box(-_PROPRIO_BOUND, _PROPRIO_BOUND, dtype=np.float32),
                "instruction": _text_space(self.task.instruction),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)

    @classmethod
    def prepare(
        cls,
        suite: str,
        task_id: int = 0,
        assets: str | os.PathLike[str] | None = None,
        scene_seed: int = 0,
        **_of_each_env: object,
    ) -> None:
        """Build the scene of such an environment and keep it in this process, without OpenGL.

        An environment that is made later with the same keywords, here or in a forked child, uses it
        instead of building one. One environment uses it at a time; closing it leaves the scene for
        the next. Other keywords are ignored.
        """
        task = find_task(suite, task_id)
        keep_scene(SceneKey(task, find_assets_for(task.package, assets).path, scene_seed))

    def open_graphics(self) -> None:
        """Open OpenGL now instead of at the first picture, in a process that will not fork.

        Raises: `EnvError`.
        """
        if self._cameras is None:
            cameras: dict[str, Orientation] = {CAMERAS[name]: "mirrored" for name in self._pictures}
            self._cameras = Cameras(
                self.scene.model, cameras, self._image_size, self._quality, LIBERO_STYLE
            )

    @property
    def scene(self) -> Scene:
        """The simulated scene with its hidden state, for scripted experts and probes.

        Policies must not use it.
        """
        if self._scene is None:
            raise RuntimeError("this environment is closed; make a new one.")
        return self._scene

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode from `options["init_state_id"]`, else from an initial state that the
        seed picks.
        """
        scene = self.scene
        super().reset(seed=seed)
        self._init_state_id = self._choose_init_state(options or {})
        self._num_steps, self._is_success, self._is_over = 0, False, False
        if self._init_state_id < len(self._init_states):
            reset_number = self._init_state_id if self._scenes == "published" else 0
            scene.begin(self._init_states[self._init_state_id], reset_number)
        else:
            scene.begin_drawn(self._init_state_id)
        for _ in range(self._num_settle_steps):
            scene.advance(np.array(IDLE_ACTION))
        self._draw()
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step.

        Raises: `ValueError` or `TypeError` for a bad action, `RuntimeError` outside an episode.
        """
        scene = self.scene
        if self._is_over:
            state = "the episode has ended" if self._images else "no episode has begun"
            raise RuntimeError(f"step was called, but {state}; call reset first.")
        is_success = scene.advance(_checked(action))
        self._num_steps += 1
        self._is_success = is_success
        truncated = not is_success and self._num_steps >= self.step_limit
        self._is_over = is_success or truncated
        self._images_are_new = False
        if self.render_every_step or self._is_over:
            self._draw()
        return self._observation(), float(is_success), is_success, truncated, self._info()

    def render(self) -> np.ndarray | None:
        """Return the picture `render_key` of the last step, uint8 [S, S, 3].

        None without a render mode.
        """
        if self.render_mode is None:
            return None
        if not self._images:
            raise RuntimeError("render was called, but no episode has begun; call reset first.")
        if self._images_are_new:
            return self._images[self._pictures.index(self.render_key)].copy()
        return self._drawn((self.render_key,))[0]

    def get_state(self) -> dict[str, Any]:
        """Return the whole state of the environment as plain values.

        Continuing from it elsewhere gives the same bits.
        """
        return {
            "task": self.task.key,
            **{name: self._info()[name] for name in _RECORDED_IN_STATES},
            "scene": self.scene.get_state(),
            "init_state_id": self._init_state_id,
            "num_steps": self._num_steps,
            "is_success": self._is_success,
            "is_over": self._is_over,
            "images": list(self._images),
            "images_are_new": self._images_are_new,
            "rng": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, in this process or another; return the
        observation there.

        Raises: `ValueError` for a state of another task, or of an environment with other arguments.
        """
        if state["task"] != self.task.key:
            raise ValueError(
                f"the state is one of {state['task']}, this environment has the task "
                f"{self.task.key}."
            )
        own = self._info()
        for name in _RECORDED_IN_STATES:
            if state.get(name) != own[name]:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, this environment has "
                    f"{own[name]!r}; "
                    "make this environment with the same value."
                )
        shape = (self._image_size, self._image_size, 3)
        if state["images"] and [image.shape for image in state["images"]] != [shape] * len(
            self._pictures
        ):
            found = [image.shape for image in state["images"]]
            raise ValueError(
                f"the state has images of {found}, this environment has "
                f"{len(self._pictures)} of {shape}."
            )
        self.scene.set_state(state["scene"])
        self._init_state_id, self._num_steps = state["init_state_id"], state["num_steps"]
        self._is_success, self._is_over = state["is_success"], state["is_over"]
        self._images = tuple(np.array(image, np.uint8) for image in state["images"])
        self._images_are_new = state["images_are_new"]
        self.np_random.bit_generator.state = json.loads(state["rng"])
        if not self._images:
            self._draw()
        return self._observation()

    def close(self) -> None:
        """Free the simulation and the OpenGL context; a second call does nothing."""
        if self._scene is not None:
            if self._cameras is not None:
                self._cameras.close()
            give_back_scene(self._scene_key, self._scene)
            self._scene = None

    def _choose_init_state(self, options: dict[str, Any]) -> int:
        unknown = set(options) - {"init_state_id"}
        if unknown:
            raise ValueError(
                f"reset options {sorted(unknown)} are unknown, expected only 'init_state_id'."
            )
        chosen = options.get("init_state_id")
        if chosen is None:
            return int(self.np_random.integers(len(self._init_states)))
        if not _is_whole(chosen) or not 0 <= chosen < NUM_STARTS:
            last = len(self._init_states) - 1
            raise ValueError(
                f"init_state_id is {chosen!r}, expected 0 to {last}, or up to {NUM_STARTS - 1} "
                "for a start that is drawn."
            )
        return int(chosen)

    def _draw(self) -> None:
        self._images = self._drawn(self._pictures)
        self._images_are_new = True

    def _drawn(self, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        """Return the current pictures with these names."""
        self.open_graphics()
        assert self._cameras is not None
        pictures = self._cameras.draw(
            self.scene.sample.drawn, tuple(CAMERAS[name] for name in names)
        )
        noise = self.task.variant.noise
        if noise == 0:
            return pictures
        seed = derive_seed(self._init_state_id, self.task.key, self._num_steps) % (1 << 32)
        return tuple(
            add_noise(self.task.package, picture, noise, seed) if name == "image" else picture
            for name, picture in zip(names, pictures, strict=True)
        )

    def _observation(self) -> Observation:
        return {
            **{
                name: image.copy() for name, image in zip(self._pictures, self._images, strict=True)
            },
            "state": self.scene.sample.proprio,
            "instruction": self.task.instruction,
        }

    def _info(self) -> Info:
        return {
            "task": self.task.key,
            "init_state_id": self._init_state_id,
            "scene_seed": self._scene_key.scene_seed,
            "num_steps": self._num_steps,
            "is_success": self._is_success,
            **self._recorded,
        }


def _checked(action: np.ndarray) -> np.ndarray:
    """Return `action` as float64 [7]. Raises: `TypeError` for another kind of value, `ValueError`
    for another shape or range.
    """
    if not isinstance(action, np.ndarray) or action.dtype.kind != "f":
        kind = action.dtype if isinstance(action, np.ndarray) else type(action).__name__
        raise TypeError(f"the action is {kind}, expected a float32 array of shape (7,).")
    if action.shape != (7,):
        raise ValueError(
            f"the action has shape {action.shape}, expected (7,); step runs one row of a chunk."
        )
    if not np.isfinite(action).all() or np.abs(action).max() > 1.0:
        raise ValueError(
            f"the action is {action.tolist()}, expected numbers in [-1, 1]; clip the "
            "policy's actions."
        )
    return action.astype(np.float64)


def _refuse_other(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}.")


def _refuse_below(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or not _is_whole(value) or value < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number >= {least}.")


def _is_whole(value: object) -> bool:
    """Return whether a value is a whole number and not a bool; in Python, True and False
    are ints.
    """
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _text_space(instruction: str) -> spaces.Text:
    """Return the same space for every task of LIBERO.

    Variants have longer instructions with other characters.
    """
    others = "".join(sorted(set(instruction) - set(_INSTRUCTION_CHARACTERS)))
    return spaces.Text(max(256, len(instruction)), charset=_INSTRUCTION_CHARACTERS + others)
