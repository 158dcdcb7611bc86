"""An environment without computation, to measure transport: two camera frames and eight floats a
step.

Child processes build it as `benchmarks.frames_env:benchmarks/frames-v0`.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.types import Info, Observation

FRAME = (224, 224, 3)
NUM_FRAMES = 4
FRAMES_ID = "benchmarks.frames_env:benchmarks/frames-v0"


class FramesEnv(gymnasium.Env[Observation, np.ndarray]):
    """Shows prepared images in turn and never ends.

    Observation: image, wrist_image: uint8 [224, 224, 3]; state: float32 [8].
    Action: float32 [7], ignored.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, FRAME, np.uint8),
                "wrist_image": spaces.Box(0, 255, FRAME, np.uint8),
                "state": spaces.Box(-1.0, 1.0, (8,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        rng = np.random.default_rng(0)
        self._frames = [rng.integers(0, 256, FRAME, dtype=np.uint8) for _ in range(NUM_FRAMES)]
        self._state = np.zeros(8, np.float32)
        self._count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start with the first image."""
        super().reset(seed=seed)
        self._count = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Show the next image."""
        self._count += 1
        return self._observe(), 0.0, False, False, {}

    def _observe(self) -> Observation:
        image = self._frames[self._count % NUM_FRAMES]
        wrist_image = self._frames[(self._count + 1) % NUM_FRAMES]
        return {"image": image, "wrist_image": wrist_image, "state": self._state}


if "benchmarks/frames-v0" not in gymnasium.registry:
    gymnasium.register(id="benchmarks/frames-v0", entry_point="benchmarks.frames_env:FramesEnv")
