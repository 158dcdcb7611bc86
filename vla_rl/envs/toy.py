"""Tiny environments without a simulator: a reaching task, with faults on request.

`vla_rl/toy_reach-v0` (`ToyReachEnv`) takes microseconds, needs both image and instruction, and has
a known optimum in closed form. `vla_rl/faulty-v0` (`FaultyEnv`) is for tests of fault tolerance.
"""

import enum
import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.envs.image_env import is_whole, require_state
from vla_rl.errors import StartError
from vla_rl.types import Info, Observation

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 210, 50),
}
IMAGE_SIZE = 32
NUM_INIT_STATES = 50
HALF_WIDTH = 0.2
"""Half the width of a square, in arena units."""

_CENTRES = np.array([(-0.7, 0.7), (0.7, 0.7), (-0.7, -0.7), (0.7, -0.7)])
_BACKGROUND = 30
_HAND = (250, 250, 250)
_START_RANGE = 0.3
_INIT_STATES_SEED = 20
# Steps of 0.2 do not add up exactly in binary, so that the optimum would miss an edge by one bit.
_TOLERANCE = 1e-9
_RENDER_SCALE = 8
_CHARSET = "abcdefghijklmnopqrstuvwxyz "


class ToyReachEnv(gymnasium.Env[Observation, np.ndarray]):
    """Move a white hand into the square of the colour that the instruction names.

    The arena is [-1, 1] x [-1, 1], x to the right and y up. Four coloured squares lie in its
    corners, in an order that only the image shows; the hand starts near the middle. Only the
    instruction names the colour.

    Observation:
        image: uint8 [32, 32, 3], RGB, upright.
        state: float32 [2], the hand's x and y in arena units, each in [-1, 1].
        instruction: str, such as "reach the red square".
    Action: float32 [action_dim], each in [-1, 1]. The first two move the hand by `step_size` times
        their value along x and y; the others are accepted and ignored, so that a 7-dimensional arm
        policy fits.
    Reward: 1.0 on the step that ends inside the right square, else 0.0.
    Ends: `terminated` inside any square (`info["is_success"]` says whether it was the right one),
        `truncated` after `step_limit`.
    Randomness: `reset(seed=...)` draws the order of the squares, the colour and the start;
        `options={"init_state_id": k}` takes the k-th of 50 fixed draws instead, whatever the seed.

    Args:
        task_id: 0 to 3 always asks for red, green, blue or yellow; None draws the colour at each
            reset.
        action_dim: dimensions of the action, >= 2.
        step_size: largest move of the hand along each axis in one control step, in arena units.
        step_limit: control steps before the episode is truncated. (`gymnasium.make` keeps
            `max_episode_steps` for a wrapper of its own, which works too but can only shorten an
            episode.)
        render_mode: "rgb_array" or None.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self,
        task_id: int | None = None,
        action_dim: int = 7,
        step_size: float = 0.2,
        step_limit: int = 40,
        render_mode: str | None = None,
    ) -> None:
        # True is an int, and would be task 1
        if task_id is not None and not (is_whole(task_id) and 0 <= task_id < len(COLOURS)):
            raise ValueError(
                f"task_id is {task_id!r}, expected 0 to {len(COLOURS) - 1} (or None to draw one)."
            )
        if action_dim < 2:
            raise ValueError(
                f"action_dim is {action_dim}, expected >= 2: the first two move the hand."
            )
        if step_size <= 0 or step_limit < 1:
            raise ValueError(
                f"step_size is {step_size} and step_limit {step_limit}, expected > 0 and >= 1."
            )
        self.render_mode = render_mode
        self.render_every_step = True
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8),
                "state": spaces.Box(-1.0, 1.0, (2,), np.float32),
                "instruction": Words(max_length=64, charset=_CHARSET),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (action_dim,), np.float32)
        self._task_id = task_id
        self._step_size = step_size
        self._step_limit = step_limit
        self._hand = np.zeros(2)
        self._order = np.arange(len(COLOURS))
        self._goal = 0
        self._num_steps = 0
        self._is_over = True
        self._image = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode, drawn from `seed` or from the fixed list.

        `options={"init_state_id": k}` takes it from the list.
        """
        super().reset(seed=seed)
        unknown = set(options or {}) - {"init_state_id"}
        if unknown:
            raise ValueError(
                f"reset options {sorted(unknown)} are unknown, expected only 'init_state_id'."
            )
        init_state_id = (options or {}).get("init_state_id")
        # A fixed start has a generator of its own, so that it is the same whatever was drawn
        # before.
        rng = self.np_random if init_state_id is None else _fixed_rng(init_state_id)
        self._order = rng.permutation(len(COLOURS))
        drawn_goal = int(rng.integers(len(COLOURS)))
        self._goal = drawn_goal if self._task_id is None else self._task_id
        self._hand = rng.uniform(-_START_RANGE, _START_RANGE, 2)
        self._num_steps = 0
        self._is_over = False
        return self._observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Move the hand for one control step."""
        if self._is_over:
            raise gymnasium.error.ResetNeeded(
                "the episode is over or has not begun; call reset() first."
            )
        given = np.asarray(action, np.float64)
        # A single number would move the hand along both axes.
        if given.ndim != 1 or len(given) < 2:
            raise ValueError(
                f"the action has shape {given.shape}, expected {self.action_space.shape}."
            )
        wanted = given[:2]
        # NaN passes the clip, and would stay in the hand's position until the episode ends.
        if np.isnan(wanted).any():
            raise ValueError(
                f"the action moves the hand by {wanted.tolist()}, expected numbers in [-1, 1]; look "
                "at what chose it."
            )
        move = np.clip(wanted, -1.0, 1.0) * self._step_size
        self._hand = np.clip(self._hand + move, -1.0, 1.0)
        self._num_steps += 1
        inside = np.abs(self._hand - _CENTRES).max(axis=1) <= HALF_WIDTH + _TOLERANCE
        # A wrong square ends the episode too: otherwise a policy could visit all four, and never
        # read the instruction.
        terminated = bool(inside.any())
        is_success = bool(inside[self._goal_corner])
        truncated = not terminated and self._num_steps >= self._step_limit
        self._is_over = terminated or truncated
        return self._observe(), float(is_success), terminated, truncated, {"is_success": is_success}

    def render(self) -> np.ndarray | None:
        """Return the current image, enlarged to 256 x 256; None without a render mode."""
        if self.render_mode is None:
            return None
        return self._draw().repeat(_RENDER_SCALE, axis=0).repeat(_RENDER_SCALE, axis=1)

    def optimal_action(self) -> np.ndarray:
        """Return the float32 [action_dim] that reaches the right square in the fewest steps."""
        action = np.zeros(self.action_space.shape or (), np.float32)
        action[:2] = np.clip(
            (_CENTRES[self._goal_corner] - self._hand) / self._step_size, -1.0, 1.0
        )
        return action

    def optimal_num_steps(self) -> int:
        """Return the fewest control steps from here into the right square."""
        distance = float(np.abs(_CENTRES[self._goal_corner] - self._hand).max())
        return max(0, math.ceil((distance - HALF_WIDTH) / self._step_size - _TOLERANCE))

    def get_state(self) -> dict[str, Any]:
        """Return all state that later steps depend on, as plain values for other processes."""
        return {
            "hand": self._hand.copy(),
            "order": self._order.copy(),
            "goal": self._goal,
            "num_steps": self._num_steps,
            "is_over": self._is_over,
            "rng": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, in this process or another.

        Return the observation there. Raises: ValueError for anything else.
        """
        require_state(state, self.get_state())
        self._hand = np.array(state["hand"], np.float64)
        self._order = np.array(state["order"])
        self._goal, self._num_steps, self._is_over = (
            state["goal"],
            state["num_steps"],
            state["is_over"],
        )
        self.np_random.bit_generator.state = json.loads(state["rng"])
        self._image = self._draw()
        return self._observe()

    def goal_position(self) -> np.ndarray:
        """Return the centre of the right square: float64 [2], in arena units."""
        centre: np.ndarray = _CENTRES[self._goal_corner].copy()
        return centre

    @property
    def _goal_corner(self) -> int:
        return int(self._order[self._goal])

    def _observe(self) -> Observation:
        if self.render_every_step or self._is_over:
            self._image = self._draw()
        instruction = f"reach the {list(COLOURS)[self._goal]} square"
        return {
            "image": self._image.copy(),
            "state": self._hand.astype(np.float32),
            "instruction": instruction,
        }

    def _draw(self) -> np.ndarray:
        image = np.full((IMAGE_SIZE, IMAGE_SIZE, 3), _BACKGROUND, np.uint8)
        for colour, corner in zip(COLOURS.values(), self._order, strict=True):
            _fill_square(image, _CENTRES[corner], HALF_WIDTH, colour)
        _fill_square(image, self._hand, 0.08, _HAND)
        return image


def _fixed_rng(init_state_id: int) -> np.random.Generator:
    if not is_whole(init_state_id) or not 0 <= init_state_id < NUM_INIT_STATES:
        raise ValueError(
            f"init_state_id is {init_state_id!r}, expected 0 to {NUM_INIT_STATES - 1}."
        )
    return np.random.default_rng((_INIT_STATES_SEED, init_state_id))


def _fill_square(
    image: np.ndarray, centre: np.ndarray, half_width: float, colour: tuple[int, int, int]
) -> None:
    """Paint the square around `centre`, given in arena units with y up, into rows that run down."""
    left, right = (_to_pixel(centre[0] - half_width), _to_pixel(centre[0] + half_width))
    top, bottom = (_to_pixel(-centre[1] - half_width), _to_pixel(-centre[1] + half_width))
    image[top : bottom + 1, left : right + 1] = colour


def _to_pixel(coordinate: float) -> int:
    return min(max(int((coordinate + 1.0) / 2.0 * IMAGE_SIZE), 0), IMAGE_SIZE - 1)


class Fault(enum.Enum):
    """Kind of fault."""

    RAISE = "raise"
    NO_START = "no_start"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    MISSING_KEY = "missing_key"
    NOT_FINITE_REWARD = "not_finite_reward"
    NEVER_ANSWER = "never_answer"
    EXIT = "exit"
    KILL = "kill"
    STOP = "stop"
    ASK = "ask"
    LEAK = "leak"


class FaultyEnv(ToyReachEnv):
    """`ToyReachEnv` with a `fault` at control step `at_step` of at most `times` episodes.

    The number of faults is stored in the folder `ledger`, one file for each, so that the count
    survives the process: an episode that is run again after a fault succeeds once `times` is used
    up. Without a ledger it is counted in memory.

    Args:
        fault: "raise", "no_start" (raises `StartError`), "wrong_shape", "wrong_dtype", "missing_key",
            "not_finite_reward" (steps only), "never_answer", "exit" (code 3), "kill" (SIGKILL), "stop"
            (SIGSTOP), "ask" (reads a line from stdin), "leak" (keeps 32 MiB).
        at_step: 0 is the reset, 1 the first control step.
        times: number of faults before the environment works.
        ledger: an existing folder, or None.
        task_id, step_limit: as in `ToyReachEnv`.
    """

    def __init__(
        self,
        fault: str = "",
        at_step: int = 1,
        times: int = 1,
        ledger: str | None = None,
        task_id: int | None = None,
        step_limit: int = 40,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(task_id=task_id, step_limit=step_limit, render_mode=render_mode)
        if fault not in [each.value for each in Fault]:
            raise ValueError(
                f"fault is {fault!r}, expected one of {', '.join(each.value for each in Fault)}."
            )
        self._fault = Fault(fault)
        self._at_step = at_step
        self._times = times
        self._ledger = None if ledger is None else Path(ledger)
        self._happened = 0
        self._leaked: list[np.ndarray] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode, or fail."""
        observation, info = super().reset(seed=seed, options=options)
        if self._at_step == 0 and self._is_due():
            observation = self._misbehave(observation)
        return observation, info

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Move the hand, or fail."""
        observation, reward, terminated, truncated, info = super().step(action)
        if self._num_steps == self._at_step and self._is_due():
            observation = self._misbehave(observation)
            if self._fault is Fault.NOT_FINITE_REWARD:
                reward = float("nan")
        return observation, reward, terminated, truncated, info

    def _is_due(self) -> bool:
        happened = self._happened if self._ledger is None else len(list(self._ledger.iterdir()))
        if happened >= self._times:
            return False
        self._happened += 1
        if self._ledger is not None:
            # A file for each fault, because the process that had it is dead: the one that replaces
            # it counts the files.
            (self._ledger / f"{self._fault.value}-{happened}-{os.getpid()}").touch()
        return True

    def _misbehave(self, observation: Observation) -> Observation:
        match self._fault:
            case Fault.RAISE:
                raise RuntimeError("the simulator lost its mind, as it was told to")
            case Fault.NO_START:
                raise StartError("there is no such start, as it was told")
            case Fault.WRONG_SHAPE:
                return {**observation, "image": observation["image"][:-4]}
            case Fault.WRONG_DTYPE:
                return {**observation, "state": observation["state"].astype(np.float64)}
            case Fault.MISSING_KEY:
                return {key: value for key, value in observation.items() if key != "instruction"}
            case Fault.NEVER_ANSWER:
                # A frozen simulator is alive for the kernel, and answers no more.
                threading.Event().wait()
            case Fault.EXIT:
                os._exit(3)
            case Fault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Fault.ASK:
                # LIBERO asks this at its first import without a configuration. A worker has to
                # answer with an error, where a program without stdin ended with EOFError.
                input("Do you want to specify a custom path for the dataset folder? (Y/N): ")
            case Fault.LEAK:
                self._leaked.append(np.ones(2**25, np.uint8))
            case Fault.NOT_FINITE_REWARD:
                pass
        return observation
