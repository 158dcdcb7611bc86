"""Meta-World's scripted policies as experts."""

import warnings
from typing import Any

import numpy as np

from vla_rl.envs.metaworld.package import load_metaworld
from vla_rl.envs.metaworld.scene import Scene


class MetaWorldExpert:
    """Solves the task of one scene by Meta-World's own program; it has no memory."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._policy: Any = load_metaworld().experts[f"{scene.task.name}-v3"]()

    def begin(self) -> None:
        """Do nothing: the program reads where everything is at each step."""

    def act(self) -> np.ndarray:
        """Return the action for the current scene, float32 [4]."""
        with warnings.catch_warnings():
            # that a displacement is above 1, which Meta-World clips
            warnings.simplefilter("ignore", UserWarning)
            action = self._policy.get_action(self._scene.observation)
        return np.asarray(np.clip(action, -1.0, 1.0), np.float32)

    @property
    def obstacle(self) -> str | None:
        """None: these programs do not know why they fail."""
        return None
