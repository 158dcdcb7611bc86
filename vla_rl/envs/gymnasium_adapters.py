"""Adapters to gymnasium: a space of instructions, a wrapper that runs action chunks.

AsyncVectorEnv reads a plain `Text` in shared memory once, when it is made (gymnasium 1.4), so that
every instruction would be a row of the same letter. `Words` are read whenever an observation is
returned. `ActionChunks` is for environments that run in this process.
"""

import functools
from collections.abc import Sequence
from typing import Any, overload

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import read_from_shared_memory

from vla_rl.env_workers.checked_env import run_chunk
from vla_rl.types import Observation


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
