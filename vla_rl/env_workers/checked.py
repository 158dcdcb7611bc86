"""A gymnasium environment whose outputs are checked against its spaces.

Each fault of its code is reported as its own.

Used inside the simulator's process; knows nothing about processes or asyncio.
"""

import math
from typing import Any

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces

from vla_rl.env_workers.attributes import call
from vla_rl.env_workers.making import make_env
from vla_rl.env_workers.open_loop import run_chunk
from vla_rl.env_workers.plain import as_plain
from vla_rl.env_workers.spaces import (
    SpaceDescription,
    describe_space,
    holds_only_plain,
    holds_tuple,
    observation_check,
    out_of_space,
    spell,
    with_tuples,
)
from vla_rl.env_workers.wrapping import classes_of_wrappers
from vla_rl.errors import EnvError
from vla_rl.types import ChunkOutcome, EnvSpec, Info


class EnvDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Spaces and abilities of an environment, as plain values."""

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

    Each observation is checked for kind, shape and dtype, the first one of an episode also for the
    range of each number.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._was_reset = False
        self._num_steps = 0
        try:
            self._env = make_env(spec)
            self._simulator: Any = self._env.unwrapped
            if hasattr(
                self._simulator, "open_graphics"
            ):  # this process forks no more: find out now whether it can draw
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
                render_key=_render_key_of(self._env),
                wrapper_classes=classes_of_wrappers(self._env),
                metadata={
                    key: value for key, value in self._env.metadata.items() if _is_plain(value)
                },
            )
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            raise self._fault("could not be made", error) from error

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, Info]:
        """Begin an episode; return the observation and the info."""
        self._was_reset = True
        self._num_steps = 0
        try:
            answer: Any = self._env.reset(seed=seed, options=options)
        except (Exception, SystemExit) as error:
            raise self._fault("reset raised", error) from error
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise self._broken("reset", f"{spell(answer)}, expected a tuple (observation, info)")
        observation, info = self._valid("reset", answer[0]), self._valid_info("reset", answer[1])
        if (problem := out_of_space(self._env.observation_space, answer[0])) is not None:
            raise self._broken("reset", problem)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Info]:
        """Run one control step; return observation, reward, terminated, truncated, info."""
        if self._takes_tuples:
            action = with_tuples(self._env.action_space, action)
        try:
            answer: Any = self._env.step(action)
        except (Exception, SystemExit) as error:
            raise self._fault("step raised", error) from error
        if not isinstance(answer, tuple) or len(answer) != 5:
            expected = "expected a tuple (observation, reward, terminated, truncated, info)"
            raise self._broken("step", f"{spell(answer)}, {expected}")
        self._num_steps += 1
        observation, reward, terminated, truncated, info = answer
        if (problem := self._wrong(observation)) is not None:
            raise self._broken("step", problem)
        if not self._is_plain:
            observation = as_plain(observation, "observation")
        if type(info) is not dict or info:
            info = self._valid_info("step", info)
        if (
            type(reward) is float
            and reward - reward == 0.0
            and type(terminated) is bool
            and type(truncated) is bool
        ):
            return observation, reward, terminated, truncated, info
        if not isinstance(reward, (float, int, np.number)) or not math.isfinite(reward):
            raise self._broken("step", f"reward {spell(reward)}, expected a finite number")
        if not isinstance(terminated, (bool, np.bool_)):
            raise self._broken("step", f"terminated {spell(terminated)}, expected a bool")
        if not isinstance(truncated, (bool, np.bool_)):
            raise self._broken("step", f"truncated {spell(truncated)}, expected a bool")
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
            return as_plain(self._env.render(), "the picture")
        except (Exception, SystemExit) as error:
            raise self._fault("render raised", error) from error

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """See `attributes.call`."""
        return call(self._env, name, args, kwargs)

    def set_attr(self, name: str, value: Any) -> None:
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
            raise self._broken(method, f"info {spell(info)}, expected a dict")
        if not info:
            return {}
        try:
            plain: Info = as_plain(info, "info")
        except TypeError as error:
            raise EnvError(
                f"{self.spec.id}: {method} returned an info that cannot be sent: {error}."
            ) from None
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


def _render_key_of(env: gymnasium.Env[Any, Any]) -> str | None:
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
