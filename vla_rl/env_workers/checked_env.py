"""A gymnasium environment whose outputs are checked against its spaces.

Each fault of its code is reported as its own. Used inside the simulator's process; knows nothing about
processes or asyncio.

`run_chunk` executes H control steps chosen at once, one row of an action chunk each. Images between
the first and the last row are unused, unless a wrapper reads them. An environment whose unwrapped
class has `render_every_step: bool` may skip them while it is False; it renders anyway when the episode
ends. Code that needs some of them (a video, a reward on whole trajectories) asks for frames, which are
what `render` returns. If that is also an image of the observation, the unwrapped class names its key
in `render_key: str`.
"""

import math
from typing import Any

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces

from vla_rl.env_workers.make_env import get_wrapper_classes, make_env, needs_every_step
from vla_rl.env_workers.spaces import (
    SpaceDescription,
    as_plain,
    call_method,
    describe_space,
    describe_value,
    find_out_of_range,
    find_wrong_entry,
    holds_only_plain,
    holds_tuple,
    is_truth,
    observation_check,
    restore_tuples,
)
from vla_rl.errors import EnvError, StartError
from vla_rl.types import ChunkOutcome, EnvSpec, Info


def run_chunk(
    env: gymnasium.Env[Any, Any],
    actions: np.ndarray,
    *,
    frames_every: int | None = None,
    num_steps_before: int = 0,
) -> tuple[Any, np.ndarray, bool, bool, Info]:
    """Run the rows of `actions` until they are done or the episode ends.

    Args:
        env: reset, and not yet at its end.
        actions: [H, ...], H >= 1, each row an action of `env`.
        frames_every: keep what `render` returns after each k-th control step of the episode; None
            for no frames.
        num_steps_before: control steps of this episode before the chunk, from which `frames_every`
            counts.

    Returns: the observation after the last executed row; float32 [N], one reward for each executed
        row; terminated; truncated; the last row's info, with `num_executed` = N and, if frames were
        due, `frames`: uint8 [n, ...].

    Raises: `ValueError` for a chunk without rows, or if frames are due and the environment renders
        none; `EnvError` if `step` returns something else than gymnasium's five values.
    """
    if frames_every is not None and frames_every < 1:
        raise ValueError(
            f"frames_every is {frames_every}, expected >= 1 control steps, or None for no frames."
        )
    if len(actions) < 1:
        raise ValueError(f"action chunk is {actions.shape}, expected at least one row.")
    simulator: Any = env.unwrapped
    can_skip = hasattr(simulator, "render_every_step") and not needs_every_step(env)
    rewards: list[float] = []
    frames: list[np.ndarray] = []
    last = len(actions) - 1
    try:
        for number, row in enumerate(actions):
            # drawing is most of a LIBERO step, and nobody looks at the images inside a chunk
            if can_skip:
                simulator.render_every_step = number == last
            observation, reward, terminated, truncated, info = _unpack_step(env, env.step(row))
            rewards.append(reward)
            if frames_every is not None and (num_steps_before + len(rewards)) % frames_every == 0:
                frames.append(_render_frame(env))
            if terminated or truncated:
                break
    finally:
        if can_skip:
            simulator.render_every_step = True
    # A copy: the dict belongs to the environment, which may return the same one at its next step.
    executed = {**info, "num_executed": len(rewards)}
    if frames:
        executed["frames"] = np.stack(frames)
    return observation, np.array(rewards, np.float32), bool(terminated), bool(truncated), executed


def _unpack_step(env: gymnasium.Env[Any, Any], answer: Any) -> tuple[Any, float, Any, Any, Any]:
    """Return the values of `step`.

    Raises: EnvError if it is not a tuple of five, or its reward is not a number.
    """
    if not isinstance(answer, tuple) or len(answer) != 5:
        what = f"a tuple of {len(answer)}" if isinstance(answer, tuple) else describe_value(answer)
        expected = "a tuple (observation, reward, terminated, truncated, info)"
        raise EnvError(f"{_get_name(env)}: step returned {what}, expected {expected}")
    observation, reward, terminated, truncated, info = answer
    if type(reward) is not float:
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise EnvError(
                f"{_get_name(env)}: step returned the reward {describe_value(reward)}, expected a number"
            ) from None
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not is_truth(value):
            raise EnvError(
                f"{_get_name(env)}: step returned {name} {describe_value(value)}, expected a bool"
            )
    return observation, reward, terminated, truncated, info


def _get_name(env: gymnasium.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def _render_frame(env: gymnasium.Env[Any, Any]) -> np.ndarray:
    image: Any = env.render()
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f"frames are wanted, but render returned {type(image).__name__}; make the "
            "environment with "
            'render_mode="rgb_array".'
        )
    return image


class EnvDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Spaces and abilities of an environment, as plain values.

    Example:
        CartPole, which has no state to store and does not render:

        EnvDescription(observation_space={"kind": "Box", "low": ..., "high": ..., "dtype": "float32"},
                       action_space={"kind": "Discrete", "n": 2, "start": 0, "dtype": "int64"},
                       has_state=False, render_mode=None, render_key=None, metadata={"render_fps": 50})
    """

    observation_space: SpaceDescription
    action_space: SpaceDescription
    has_state: bool
    """Whether it offers `get_state` and `set_state`."""

    render_mode: str | None
    render_key: str | None
    """Key of the image in the observation that `render` also returns; None if the environment does
    not declare it."""

    metadata: dict[str, Any]

    wrapper_classes: frozenset[str] = frozenset()
    """`module:name` of each wrapper's class and of its base classes."""


class CheckedEnv:
    """One environment built from its spec.

    Each method raises `EnvError` for a fault of the environment.

    Observations are checked for kind, shape and dtype, the first of an episode also for its range.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._was_reset = False
        self._num_steps = 0
        try:
            self._env = make_env(spec)
            self._simulator: Any = self._env.unwrapped
            # this process forks no more: find out now whether it can draw, and not in the first episode
            if hasattr(self._simulator, "open_graphics"):
                self._simulator.open_graphics()
            self._wrong = observation_check(self._env.observation_space)
            self._takes_tuples = holds_tuple(self._env.action_space)
            self._is_plain = holds_only_plain(self._env.observation_space)
            self.description = EnvDescription(
                observation_space=describe_space(self._env.observation_space),
                action_space=describe_space(self._env.action_space),
                has_state=hasattr(self._simulator, "get_state")
                and hasattr(self._simulator, "set_state"),
                render_mode=self._env.render_mode,
                render_key=_get_render_key(self._env),
                wrapper_classes=get_wrapper_classes(self._env),
                metadata={
                    key: value for key, value in self._env.metadata.items() if _is_plain(value)
                },
            )
        except EnvError:
            raise
        # SystemExit too: an environment that calls sys.exit would end the process of all its neighbours
        except (Exception, SystemExit) as error:
            raise self._fault("could not be made", error) from error

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Info]:
        """Begin an episode; return the observation and the info."""
        self._was_reset = True
        self._num_steps = 0
        try:
            answer: Any = self._env.reset(seed=seed, options=options)
        except StartError:  # of this episode alone: its caller may go on to another start
            raise
        except (Exception, SystemExit) as error:
            raise self._fault("reset raised", error) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._broken(
                "reset", f"{describe_value(answer)}, expected a tuple (observation, info)"
            )
        observation, info = self._valid("reset", answer[0]), self._valid_info("reset", answer[1])
        # once an episode: comparing 224x224 pixels with their bounds takes 100 us, as long as a whole message
        if (problem := find_out_of_range(self._env.observation_space, answer[0])) is not None:
            raise self._broken("reset", problem)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Run one control step; return observation, reward, terminated, truncated, info."""
        if self._takes_tuples:
            action = restore_tuples(self._env.action_space, action)
        try:
            answer: Any = self._env.step(action)
        except (Exception, SystemExit) as error:
            raise self._fault("step raised", error) from error
        if not isinstance(answer, tuple) or len(answer) != 5:
            expected = "expected a tuple (observation, reward, terminated, truncated, info)"
            raise self._broken("step", f"{describe_value(answer)}, {expected}")
        self._num_steps += 1
        observation, reward, terminated, truncated, info = answer
        if (problem := self._wrong(observation)) is not None:
            raise self._broken("step", problem)
        if not self._is_plain:
            observation = as_plain(observation, "observation")
        if type(info) is not dict or info:
            info = self._valid_info("step", info)
        # the usual answer first: four comparisons of types instead of the checks below
        if (
            type(reward) is float
            and reward - reward == 0.0
            and type(terminated) is bool
            and type(truncated) is bool
        ):
            return observation, reward, terminated, truncated, info
        if not isinstance(reward, (float, int, np.number)) or not math.isfinite(reward):
            raise self._broken("step", f"reward {describe_value(reward)}, expected a finite number")
        if not isinstance(terminated, (bool, np.bool_)):
            raise self._broken("step", f"terminated {describe_value(terminated)}, expected a bool")
        if not isinstance(truncated, (bool, np.bool_)):
            raise self._broken("step", f"truncated {describe_value(truncated)}, expected a bool")
        return observation, float(reward), bool(terminated), bool(truncated), info

    def step_chunk(self, actions: np.ndarray, frames_every: int | None = None) -> ChunkOutcome:
        """Run the rows until they are done or the episode ends; check the last observation.

        A frame is kept after each `frames_every`-th control step since the reset (or `set_state`).
        """
        try:
            answer = run_chunk(
                self._env, actions, frames_every=frames_every, num_steps_before=self._num_steps
            )
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise self._fault("step raised", error) from error
        observation, rewards, terminated, truncated, info = answer
        self._num_steps += len(rewards)
        # A NaN would reach the advantage of the whole group, where nothing tells which environment
        # it came from.
        if not np.isfinite(rewards).all():
            raise self._broken("step", f"rewards {rewards.tolist()}, expected finite numbers")
        return ChunkOutcome(
            observation=self._valid("step", observation),
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            info=self._valid_info(
                "step", {key: value for key, value in info.items() if key != "frames"}
            ),
            frames=info.get("frames"),
            frames_key=self.description.render_key,
        )

    def render(self) -> Any:
        """Return what the environment's render returns: an image in the mode "rgb_array"."""
        try:
            return as_plain(self._env.render(), "the image")
        except (Exception, SystemExit) as error:
            raise self._fault("render raised", error) from error

    def call_method(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """See `call_method`."""
        return call_method(self._env, name, args, kwargs)

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute of the environment, or of the wrapper that has it."""
        self._env.set_wrapper_attr(name, value)

    def get_state(self) -> Any:
        """Return the simulator's state as plain values.

        Raises: TypeError if the environment does not support it.
        """
        self._require_state()
        try:
            return as_plain(self._simulator.get_state(), "the state")
        except (Exception, SystemExit) as error:
            raise self._fault("get_state raised", error) from error

    def set_state(self, state: Any) -> Any:
        """Continue from `state`; return the observation there."""
        self._require_state()
        try:
            if not self._was_reset:  # wrappers require a reset before the first step
                self._env.reset()
                self._was_reset = True
            observation = self._simulator.set_state(state)
        except (Exception, SystemExit) as error:
            raise self._fault("set_state raised", error) from error
        self._num_steps = 0
        return self._valid("set_state", observation)

    def close(self) -> None:
        """Close the environment."""
        try:
            self._env.close()
        except (Exception, SystemExit) as error:
            raise self._fault("close raised", error) from error

    def _require_state(self) -> None:
        if not self.description.has_state:
            raise TypeError(
                f"{self.spec.id} has no get_state and set_state on its unwrapped class."
            )

    def _valid(self, method: str, observation: Any) -> Any:
        """Return the observation as plain values.

        Raises: EnvError if it is not what the space declares.
        """
        if (problem := self._wrong(observation)) is not None:
            raise self._broken(method, problem)
        return observation if self._is_plain else as_plain(observation, "observation")

    def _valid_info(self, method: str, info: Any) -> Info:
        if not isinstance(info, dict):
            raise self._broken(method, f"info {describe_value(info)}, expected a dict")
        if not info:
            return {}
        try:
            plain: Info = as_plain(info, "info")
        except TypeError as error:
            raise EnvError(
                f"{self.spec.id}: {method} returned an info that cannot be sent: {error}."
            ) from None
        if (problem := find_wrong_entry(plain)) is not None:
            raise EnvError(f"{self.spec.id}: {method} returned an info with {problem}.")
        return plain

    def _broken(self, method: str, problem: str) -> EnvError:
        return EnvError(
            f"{self.spec.id}: {method} returned {problem}; its spaces must describe "
            "what it returns."
        )

    def _fault(self, what: str, error: BaseException) -> EnvError:
        """Describe an error of the environment's code as its own fault.

        The traceback is that of the cause.
        """
        arguments = f" with {self.spec.kwargs}" if self.spec.kwargs else ""
        return EnvError(f"{self.spec.id}{arguments} {what}: {error!r}")


def _get_render_key(env: gymnasium.Env[Any, Any]) -> str | None:
    """Return `render_key` of the unwrapped class.

    Raises: ValueError if the observation has no such key.
    """
    key: str | None = getattr(env.unwrapped, "render_key", None)
    keys = sorted(env.observation_space) if isinstance(env.observation_space, spaces.Dict) else []
    if key is not None and key not in keys:
        raise ValueError(
            f"its render_key is {key!r}, expected a key of its observation, one of "
            f"{keys}, or none at all"
        )
    return key


def _is_plain(value: Any) -> bool:
    try:
        as_plain(value, "metadata")
    except TypeError:
        return False
    return True
