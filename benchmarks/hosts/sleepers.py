"""Simulators that sleep for as long as LIBERO computes, and show images as large as its own.

Child processes build it as `benchmarks.hosts.sleepers:benchmarks/sleeper-v0`.
"""

import os
import time
import zlib
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from benchmarks.hosts.measured import ChunkTimes, num_decisions
from vla_rl.types import Info, Observation

SLEEPER_ID: Final = "benchmarks.hosts.sleepers:benchmarks/sleeper-v0"
IMAGE_SHAPE: Final = (224, 224, 3)
STATE_SIZE: Final = 8
CHUNK_SIZE: Final = 8
ACTION_DIM: Final = 7


class SleepingEnv(gymnasium.Env[Observation, np.ndarray]):
    """Sleeps for the time of an action chunk when its first action comes.

    Observation: image: uint8 [224, 224, 3]; state: float32 [8].
    Action: float32 [7]. The first one of an episode decides how many decisions it has.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, IMAGE_SHAPE, np.uint8),
                "state": spaces.Box(-1.0, 1.0, (STATE_SIZE,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        # a process of its own each: all would draw the same times from one seed
        self._times = ChunkTimes(os.getpid())
        image = np.random.default_rng(0).integers(0, 256, IMAGE_SHAPE, dtype=np.uint8)
        self._seen: Observation = {"image": image, "state": np.zeros(STATE_SIZE, np.float32)}
        self._num_steps = self._last_step = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Begin an episode of any length."""
        super().reset(seed=seed)
        self._num_steps = 0
        return self._seen, {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Sleep if it is the first action of a chunk."""
        if self._num_steps == 0:
            self._last_step = CHUNK_SIZE * num_decisions(zlib.crc32(action.tobytes()))
        if self._num_steps % CHUNK_SIZE == 0:
            time.sleep(self._times.next_s())
        self._num_steps += 1
        is_over = self._num_steps >= self._last_step
        return self._seen, float(is_over), is_over, False, {"is_success": is_over}


if "benchmarks/sleeper-v0" not in gymnasium.registry:
    gymnasium.register(
        id="benchmarks/sleeper-v0", entry_point="benchmarks.hosts.sleepers:SleepingEnv"
    )
