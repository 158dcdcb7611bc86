"""`ImageEnv`: what the environments of every manipulation benchmark have in common.

A benchmark derives from it (`LiberoEnv`, `MetaWorldEnv`) and adds its simulation and its cameras;
the rules that every one of them keeps are here: what `reset` and `step` refuse, when an episode
ends, what a saved state holds, which images are drawn.
"""

import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import gymnasium
import numpy as np

from vla_rl.types import Info, Observation

NUM_STARTS: Final = 1 << 31
"""Number of starts of a task: first its fixed ones, which evaluations use, then drawn ones."""


_STATE_KEYS: Final = frozenset(
    {"task", "scene", "init_state_id", "num_steps", "is_success", "is_over", "images"}
    | {"images_are_new", "rng"}
)
"""Keys that every saved state has."""


class Task(Protocol):
    """The task of an environment."""

    @property
    def key(self) -> str: ...
    @property
    def instruction(self) -> str: ...


class Expert(Protocol):
    """Solves the task of one environment's simulation, whose hidden state it reads."""

    def start_over(self) -> None:
        """Start over, after a reset."""
        ...

    def start_midway(self) -> None:
        """Start over in the middle of an episode, wherever something else has moved the robot."""
        ...

    def act(self) -> np.ndarray:
        """Return the action for the current state, float32 [D]; call it once a control step."""
        ...

    @property
    def obstacle(self) -> str | None:
        """Reason why the expert stands still before its task is done; None if it does not."""
        ...


class SimulatedScene(Protocol):
    """The simulation of one task, which an environment runs."""

    def run_control_step(self, action: np.ndarray) -> bool:
        """Run one control step with float64 [D]; return whether the task is solved after it."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Return all state that a later step depends on, as plain values."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `get_state` returned."""
        ...


SceneT = TypeVar("SceneT", bound=SimulatedScene)


class ImageEnv(gymnasium.Env[Observation, np.ndarray], Generic[SceneT]):
    """Runs episodes of one task; a subclass has the scene and the cameras.

    Args:
        task: the task.
        image_keys: keys of the images in the observation.
        num_init_states: number of starts from which a seed picks one.
        step_limit: control steps after which the episode is truncated.
        render_mode: "rgb_array" or None; images are in the observation either way.
        render_key: key of the image that `render` returns.
    """

    task: Task
    """The task."""

    _scene: SceneT | None
    """The simulation; None once the environment is closed."""

    recorded_in_states: ClassVar[tuple[str, ...]] = ()
    """Entries of the info that a state depends on besides its task."""

    displacements: ClassVar[tuple[float, ...]] = ()
    """Share that each displacement of an action gets of a demonstration's noise; the number that
    follows them is the gripper's command."""

    def __init__(
        self,
        task: Task,
        image_keys: Sequence[str],
        num_init_states: int,
        step_limit: int,
        render_mode: str | None,
        render_key: str,
    ) -> None:
        require_at_least("step_limit", step_limit, 1)
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode is {render_mode!r}, expected 'rgb_array' or None.")
        require_choice("render_key", render_key, image_keys)
        self.task, self.step_limit = task, step_limit
        self.render_mode = render_mode
        self.render_key = render_key
        """Key of the image that `render` returns."""

        self.render_every_step = True
        """False skips the images of a step, unless the episode ends there; the previous ones are
        returned again."""

        self._image_keys, self._num_init_states = tuple(image_keys), num_init_states
        # Over until the first reset, so that a step before it is refused like one after the end.
        self._num_steps, self._is_success, self._is_over = 0, False, True
        self._init_state_id = -1
        self._images: tuple[np.ndarray, ...] = ()
        self._images_are_new = False

    @property
    def scene(self) -> SceneT:
        """The simulated scene with its hidden state, for scripted experts and probes.

        Policies must not use it.
        """
        if self._scene is None:
            raise RuntimeError("this environment is closed; make a new one.")
        return self._scene

    @abstractmethod
    def make_expert(self) -> Expert:
        """Return the scripted expert of the task, which reads this environment's simulation."""

    @abstractmethod
    def _begin(self, init_state_id: int) -> None:
        """Put the simulation to a start. Raises: `RuntimeError` if the environment is closed."""

    @abstractmethod
    def _draw_now(self, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        """Return the current images with these keys."""

    @abstractmethod
    def _vector(self) -> np.ndarray:
        """Return the `state` of the observation, float32 [D]."""

    @abstractmethod
    def _settings(self) -> Info:
        """Return the settings that results depend on, for the info."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode from `options["init_state_id"]`, else from one that the seed picks."""
        super().reset(seed=seed)
        self._init_state_id = self._choose_init_state(options or {})
        self._num_steps, self._is_success, self._is_over = 0, False, False
        self._begin(self._init_state_id)
        self._draw()
        return self._observation(), self._info()

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step.

        Raises: `ValueError` or `TypeError` for a bad action, `RuntimeError` outside an episode.
        """
        if self._is_over:
            state = "the episode has ended" if self._images else "no episode has begun"
            raise RuntimeError(f"step was called, but {state}; call reset first.")
        shape = self.action_space.shape
        assert shape is not None
        is_goal_reached = self.scene.run_control_step(_check_action(action, shape))
        self._num_steps += 1
        reward, self._is_success, terminated = self._evaluate_step(is_goal_reached)
        # A task that is solved at its last step is terminated: learners bootstrap from the value of
        # a truncated state, and a solved task has no reward left.
        truncated = not terminated and self._num_steps >= self.step_limit
        self._is_over = terminated or truncated
        self._images_are_new = False
        # Drawing takes most of a control step: 58 ms an image of LIBERO's own assets, against 10 ms
        # of physics. Images inside a chunk are not used. The last one is always drawn, because
        # videos and rewards end with it.
        if self.render_every_step or self._is_over:
            self._draw()
        return self._observation(), reward, terminated, truncated, self._info()

    def _evaluate_step(self, is_goal_reached: bool) -> tuple[float, bool, bool]:
        """Return the reward of a control step, whether the task is solved now, and whether it has ended."""
        return float(is_goal_reached), is_goal_reached, is_goal_reached

    def render(self) -> np.ndarray | None:
        """Return the image `render_key` of the last step, uint8 [S, S, 3].

        None without a render mode.
        """
        if self.render_mode is None:
            return None
        if not self._images:
            raise RuntimeError("render was called, but no episode has begun; call reset first.")
        if self._images_are_new:
            return self._images[self._image_keys.index(self.render_key)].copy()
        return self._draw_now((self.render_key,))[0]

    def get_state(self) -> dict[str, Any]:
        """Return the whole state of the environment as plain values.

        Continuing from it elsewhere gives the same bits.
        """
        info = self._info()
        return {
            "task": self.task.key,
            **{name: info[name] for name in self.recorded_in_states},
            "scene": self.scene.get_state(),
            "init_state_id": self._init_state_id,
            "num_steps": self._num_steps,
            "is_success": self._is_success,
            "is_over": self._is_over,
            "images": list(self._images),
            "images_are_new": self._images_are_new,
            # As text, because the state of the generator has integers of 128 bits, which no message
            # carries.
            "rng": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, in this process or another; return the
        observation there.

        Raises: `ValueError` for a state of another task, or of an environment with other arguments.
        """
        require_state(state, _STATE_KEYS)
        # A state of another scene used to be restored wherever its sizes happened to fit.
        if state["task"] != self.task.key:
            raise ValueError(
                f"the state is one of {state['task']}, this environment has the task "
                f"{self.task.key}."
            )
        own = self._info()
        for name in self.recorded_in_states:
            if state.get(name) != own[name]:
                raise ValueError(
                    f"the state was saved with {name}={state.get(name)!r}, this environment has "
                    f"{own[name]!r}; make this environment with the same value."
                )
        self._check_images(state["images"])
        self.scene.set_state(dict(state["scene"]))
        self._init_state_id, self._num_steps = state["init_state_id"], state["num_steps"]
        self._is_success, self._is_over = state["is_success"], state["is_over"]
        self._images = tuple(np.array(image, np.uint8) for image in state["images"])
        self._images_are_new = state["images_are_new"]
        self.np_random.bit_generator.state = json.loads(state["rng"])
        if not self._images:
            self._draw()
        return self._observation()

    def _check_images(self, images: Sequence[np.ndarray]) -> None:
        assert isinstance(self.observation_space, gymnasium.spaces.Dict)
        shape = self.observation_space[self._image_keys[0]].shape
        if images and [image.shape for image in images] != [shape] * len(self._image_keys):
            found = [image.shape for image in images]
            raise ValueError(
                f"the state has images of {found}, this environment has "
                f"{len(self._image_keys)} of {shape}."
            )

    def _choose_init_state(self, options: dict[str, Any]) -> int:
        unknown = set(options) - {"init_state_id"}
        if unknown:
            raise ValueError(
                f"reset options {sorted(unknown)} are unknown, expected only 'init_state_id'."
            )
        chosen = options.get("init_state_id")
        if chosen is None:
            return int(self.np_random.integers(self._num_init_states))
        if not is_whole(chosen) or not 0 <= chosen < NUM_STARTS:
            last = self._num_init_states - 1
            raise ValueError(
                f"init_state_id is {chosen!r}, expected 0 to {last}, or up to {NUM_STARTS - 1} "
                "for a start that is drawn."
            )
        return int(chosen)

    def _draw(self) -> None:
        self._images = self._draw_now(self._image_keys)
        self._images_are_new = True

    def _observation(self) -> Observation:
        return {
            **{
                # Copies, because a step that draws nothing returns these images once more.
                name: image.copy()
                for name, image in zip(self._image_keys, self._images, strict=True)
            },
            "state": self._vector(),
            "instruction": self.task.instruction,
        }

    def _info(self) -> Info:
        return {
            "task": self.task.key,
            "init_state_id": self._init_state_id,
            "num_steps": self._num_steps,
            "is_success": self._is_success,
            **self._settings(),
        }


def require_choice(name: str, value: object, known: Sequence[str]) -> None:
    """Raise `ValueError` for an argument that is not one of `known`."""
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}.")


def require_at_least(name: str, value: object, least: int) -> None:
    """Raise `ValueError` for an argument that is not a whole number of at least `least`."""
    if not isinstance(value, int) or not is_whole(value) or value < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number >= {least}.")


def require_state(state: Any, keys: Iterable[str]) -> None:
    """Raise ValueError unless `state` is a dict with these keys, as `get_state` returns one."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state is a {type(state).__name__}, expected the dict that get_state returned."
        )
    # An incomplete state would raise KeyError half-way, with the environment already changed.
    if missing := sorted(set(keys) - state.keys()):
        raise ValueError(
            f"the state has no {', '.join(missing)}, expected one that get_state returned."
        )


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number and not a bool.

    In Python, True and False are ints.
    """
    # `task_id=True` was task 1, without a word.
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_action(action: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return `action` as float64.

    Raises: `TypeError` for another kind of value, `ValueError` for another shape or range.
    """
    if not isinstance(action, np.ndarray) or action.dtype.kind != "f":
        kind = action.dtype if isinstance(action, np.ndarray) else type(action).__name__
        raise TypeError(f"the action is {kind}, expected a float32 array of shape {shape}.")
    if action.shape != shape:
        raise ValueError(
            f"the action has shape {action.shape}, expected {shape}; step runs one row of a chunk."
        )
    # NaN is not above 1: it would pass the range and stay in the controller's goal.
    if not np.isfinite(action).all() or np.abs(action).max() > 1.0:
        raise ValueError(
            f"the action is {action.tolist()}, expected numbers in [-1, 1]; clip the "
            "policy's actions."
        )
    # The bits of robosuite's control step are those of float64 actions.
    return action.astype(np.float64)
