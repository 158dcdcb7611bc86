"""Two lamps in a simulator's process, with a request, skills and a scene in words: a world for planners.

Simulator processes import it, so no policy is imported here.
"""

from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.types import EnvSpec, Info, Observation

SKILLS: Final = ("light the red lamp", "light the blue lamp")


class LampEnv(gymnasium.Env[Observation, np.ndarray]):
    """An action of at least 0.5 lights the red lamp, one of at most -0.5 the blue one; both are asked for."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as gymnasium declares it
    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
            "state": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "instruction": Words(64),
        }
    )
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, step_limit: int = 24) -> None:
        self._step_limit = step_limit

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        self._lit, self._num_steps = [False, False], 0
        return self._observe(), {
            **self._info(), "request": "light both lamps", "skills": list(SKILLS),
        }  # fmt: skip

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        self._num_steps += 1
        before = sum(self._lit)
        self._lit = [self._lit[0] or action[0] >= 0.5, self._lit[1] or action[0] <= -0.5]
        reward = 0.5 * (sum(self._lit) - before)
        return (
            self._observe(), reward, False, self._num_steps >= self._step_limit, self._info(),
        )  # fmt: skip

    def _observe(self) -> Observation:
        image = np.zeros((16, 16, 3), np.uint8)
        image[:8, :, 0], image[8:, :, 2] = 255 * self._lit[0], 255 * self._lit[1]
        return {"image": image, "state": np.array(self._lit, np.float32), "instruction": "none"}

    def _info(self) -> Info:
        names = [name for name, lit in zip(("red", "blue"), self._lit, strict=True) if lit]
        return {
            "scene": [f"The {name} lamp is lit." for name in names],
            "is_success": all(self._lit),
        }


gymnasium.register("lamps-v0", entry_point=LampEnv)

LAMPS: Final = EnvSpec(id="lamp_world:lamps-v0")
