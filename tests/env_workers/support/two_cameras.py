"""An environment with two images to see, and another image for people."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_PICTURE = spaces.Box(0, 255, (2, 2, 3), np.uint8)


class TwoCameras(gymnasium.Env[dict[str, Any], np.ndarray]):
    """After control step k `image` is k all over, and `wrist_image` 100 + k.

    Renders one of them, or 200 + k.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium declares it per instance
    observation_space = spaces.Dict({"image": _PICTURE, "wrist_image": _PICTURE})
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_key: str | None = None) -> None:
        self.render_mode = "rgb_array"
        if render_key is not None:
            self.render_key = render_key
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin at step 0."""
        super().reset(seed=seed)
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> Any:
        """Count on; the sixth step is the last."""
        self._num_steps += 1
        return self._observe(), 0.0, False, self._num_steps == 6, {}

    def render(self) -> Any:
        """The image that `render_key` names, else a third one."""
        return (
            self._observe()[self.render_key]
            if hasattr(self, "render_key")
            else _shade(200 + self._num_steps)
        )

    def _observe(self) -> dict[str, Any]:
        return {"image": _shade(self._num_steps), "wrist_image": _shade(100 + self._num_steps)}


def _shade(shade: int) -> np.ndarray:
    return np.full((2, 2, 3), shade, np.uint8)


gymnasium.register(id="two/cameras-v0", entry_point="two_cameras:TwoCameras")
