"""Action chunks as a gymnasium wrapper, for environments that run in this process."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.env_workers.open_loop import run_chunk
from vla_rl.types import Observation


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
