"""Adapters between gymnasium's environments and ours.

`ControlEnv` is any gymnasium environment whose observation is a vector: CartPole-v1 and Pendulum-v1
are two. `ActionChunks` runs action chunks in an environment of this process. `Words` is a space of
instructions: AsyncVectorEnv reads a plain `Text` in shared memory once, when it is made (gymnasium
1.4), so that every instruction would be a row of the same letter. `Words` are read whenever an
observation is returned.
"""

import functools
from collections.abc import Sequence
from typing import Any, overload

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import read_from_shared_memory

from vla_rl.env_workers.checked_env import run_chunk
from vla_rl.types import Info, Observation


# A class of its own, because gymnasium chooses how shared memory is read by the space's class.
class Words(spaces.Text):
    """A `Text` whose shared memory is read at each access."""


class SharedWords(Sequence[str]):
    """The present words of each environment; a copy is a tuple of strings."""

    def __init__(self, space: Words, memory: Any, num: int) -> None:
        self._num = num
        self._read = functools.partial(
            read_from_shared_memory.dispatch(spaces.Text), space, memory, n=num
        )

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return tuple(map(str, self._read()))[index]

    def __len__(self) -> int:
        return self._num

    # AsyncVectorEnv returns deep copies, which must not change with the next step.
    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return self[:]


@read_from_shared_memory.register(Words)
def _read_words(space: Words, shared_memory: Any, n: int = 1) -> SharedWords:
    return SharedWords(space, shared_memory, n)


class ActionChunks(gymnasium.Wrapper[Observation, np.ndarray, Observation, np.ndarray]):
    """Executes an action chunk open loop, one control step per row, until the episode ends.

    Action: float32 [chunk_size, D]; a chunk with fewer rows runs those. Reward: undiscounted sum
    over the `info["num_executed"]` rows that ran; `info["rewards"]` is float32 [num_executed], one
    for each row.

    Args:
        env: an environment whose action space is a `Box`.
        chunk_size: rows of a chunk, H >= 1.
        frames_every: also return `info["frames"]`, the `render` output after every k-th control
            step of the episode, for a video; absent if no frame is due.
    """

    def __init__(
        self,
        env: gymnasium.Env[Observation, np.ndarray],
        chunk_size: int,
        frames_every: int | None = None,
    ) -> None:
        super().__init__(env)
        row = env.action_space
        if not isinstance(row, spaces.Box):
            raise TypeError(
                f"the action space is {row}, expected a Box; other spaces cannot be chunked."
            )
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}, expected >= 1.")
        # Bounds for each row, so that `action_space.sample()` is a whole chunk.
        low, high = (
            np.broadcast_to(bound, (chunk_size, *row.shape)).copy() for bound in (row.low, row.high)
        )
        self.action_space = spaces.Box(low, high, dtype=row.dtype.type)
        self._frames_every, self._num_steps = frames_every, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an episode."""
        self._num_steps = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the chunk; the reward is the sum over the rows that ran."""
        observation, rewards, terminated, truncated, info = run_chunk(
            self.env, action, frames_every=self._frames_every, num_steps_before=self._num_steps
        )
        self._num_steps += len(rewards)
        return (
            observation,
            float(rewards.sum()),
            terminated,
            truncated,
            {**info, "rewards": rewards},
        )


class ControlEnv(gymnasium.Env[Observation, np.ndarray]):
    """A low-dimensional gymnasium environment with a dict observation and a `Box` action.

    So it can be chunked.

    Observation:
        state: float32 [D], the inner observation flattened; a `Discrete` one is one-hot.
    Action: float32 [A] in the inner environment's bounds. For a `Discrete` inner space of n actions
        it is float32 [1] in [0, n - 1], rounded to the nearest.
    Reward: the inner environment's, times `reward_scale`.
    Ends: `terminated` by the inner environment, `truncated` by its time limit, or after
        `step_limit` control steps.
    Info: the inner environment's; `return`, the unscaled return so far; and, with a
        `success_return`, `is_success`: True on the last step of an episode whose unscaled return
        reached it.
    Randomness: `reset(seed=...)`.

    Args:
        env_id: gymnasium id of the inner environment.
        step_limit: control steps after which an episode is truncated; None for the inner
            environment's own limit.
        reward_scale: factor on the rewards, so that returns are of order one.
        success_return: unscaled return that counts as success at the end of the episode. None: the
            inner environment's own `is_success`, if it has one. A success at a time limit is
            truncated, because the inner environment would have continued.
    """

    def __init__(
        self,
        env_id: str = "",
        step_limit: int | None = None,
        reward_scale: float = 1.0,
        success_return: float | None = None,
    ) -> None:
        if not env_id:
            raise ValueError(
                "env_id is missing, expected the id of the inner environment: "
                'gymnasium.make("vla_rl/control-v0", env_id="CartPole-v1").'
            )
        if step_limit is not None and step_limit < 1:
            raise ValueError(
                f"step_limit is {step_limit}, expected at least 1 control step, or None."
            )
        # without a limit of its own, no wrapper of gymnasium ends the episode without our knowledge
        self._env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, max_episode_steps=step_limit)
        self._seen = self._env.observation_space
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-np.inf, np.inf, (spaces.flatdim(self._seen),), np.float32)}
        )
        self._chosen = self._env.action_space
        self.action_space = _action_box(env_id, self._chosen)
        self._reward_scale, self._success_return = reward_scale, success_return
        self._return = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode."""
        super().reset(seed=seed)
        self._return = 0.0
        seen, info = self._env.reset(seed=seed)
        # At the reset too: an episode whose infos lack the key counts as one without a success to
        # report, and its table shows `-` instead of 0 %.
        return self._observe(seen), info if self._success_return is None else {
            **info,
            "is_success": False,
        }

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step."""
        inner = action
        if isinstance(self._chosen, spaces.Discrete):
            inner = self._chosen.start + np.int64(
                np.rint(action[0])
            )  # a scalar: some environments look it up in a dict
        seen, reward, terminated, truncated, info = self._env.step(inner)
        self._return += float(reward)
        info = {**info, "return": self._return}
        if self._success_return is not None:
            is_over = bool(terminated or truncated)
            info["is_success"] = is_over and self._return >= self._success_return
        return (
            self._observe(seen),
            float(reward) * self._reward_scale,
            bool(terminated),
            bool(truncated),
            info,
        )

    def close(self) -> None:
        """Close the inner environment."""
        self._env.close()

    def _observe(self, seen: Any) -> Observation:
        return {"state": np.asarray(spaces.flatten(self._seen, seen), np.float32)}


def _action_box(env_id: str, space: spaces.Space[Any]) -> spaces.Box:
    if isinstance(space, spaces.Discrete):
        # One number, rounded: every policy here acts in boxes.
        return spaces.Box(0.0, float(space.n - 1), (1,), np.float32)
    if (
        isinstance(space, spaces.Box)
        and len(space.shape) == 1
        and np.isfinite([space.low, space.high]).all()
    ):
        return spaces.Box(
            space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32
        )
    raise ValueError(
        f"{env_id} takes actions of {space}, expected a Discrete space or a bounded Box [A]."
    )
