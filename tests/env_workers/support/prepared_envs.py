"""Environments that are prepared before their processes are forked, in good ways and bad ones."""

import ctypes
import os
import threading
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_MODELS: dict[int, np.ndarray] = {}
_MADE_BY: dict[int, int] = {}


class Heavy(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Needs a model of `megabytes` that never changes; says who made it, and what drives it."""

    observation_space = spaces.Dict(
        {"state": spaces.Box(0, 1, (1,), np.float32), "instruction": spaces.Text(10)}
    )
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, megabytes: int = 1, colour: str = "red") -> None:
        self.prepare(megabytes)
        self._megabytes, self._colour = megabytes, colour

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Build the model, once in a process and its forks."""
        if megabytes not in _MODELS:
            _MODELS[megabytes] = np.ones(megabytes * 2**20, np.uint8)
            _MADE_BY[megabytes] = os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode; one asked to hang does so where the process number is even."""
        super().reset(seed=seed)
        info = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "made_by": _MADE_BY[self._megabytes],
            "colour": self._colour,
            "device": os.environ.get("MUJOCO_EGL_DEVICE_ID", ""),
            "draw": float(np.random.random()),
        }
        ledger = (options or {}).get("hang_once")
        if ledger is not None and not os.path.exists(ledger):
            open(ledger, "w").close()
            # holds the interpreter: no thread of this process can do anything
            ctypes.PyDLL(None).sleep(3600)
        return self._observe(), info

    def step(self, action: np.ndarray) -> Any:
        """Nothing changes."""
        return self._observe(), 0.0, False, False, {}

    def _observe(self) -> dict[str, Any]:
        return {"state": np.zeros(1, np.float32), "instruction": "stay"}


class StartsThread(Heavy):
    """Its preparation leaves a thread."""

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Start it."""
        threading.Thread(target=time.sleep, args=(3600,), name="prefetcher", daemon=True).start()


class OpensDisplay(Heavy):
    """Its preparation opens a display, as an import of a renderer may."""

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Open it."""
        from vla_rl.envs.mujoco.loading import choose_graphics

        choose_graphics()


class Hangs(Heavy):
    """Its preparation never ends."""

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Wait."""
        time.sleep(3600)


for _class in (Heavy, StartsThread, OpensDisplay, Hangs):
    gymnasium.register(
        id=f"test/{_class.__name__}-v0", entry_point=f"prepared_envs:{_class.__name__}", kwargs={}
    )
gymnasium.register(id="test/Big-v0", entry_point="prepared_envs:Heavy", kwargs={"megabytes": 64})
