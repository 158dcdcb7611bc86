"""An environment that fails on request, for tests of fault tolerance."""

import enum
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.envs.toy.reach import ToyReachEnv
from vla_rl.types import Info, Observation


class Fault(enum.Enum):
    """Kind of fault."""

    RAISE = "raise"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    MISSING_KEY = "missing_key"
    NOT_FINITE_REWARD = "not_finite_reward"
    NEVER_ANSWER = "never_answer"
    EXIT = "exit"
    KILL = "kill"
    STOP = "stop"
    ASK = "ask"
    LEAK = "leak"


class FaultyEnv(ToyReachEnv):
    """`ToyReachEnv` with a `fault` at control step `at_step` of at most `times` episodes.

    The number of faults is stored in the folder `ledger`, one file for each, so that the count
    survives the process: an episode that is run again after a fault succeeds once `times` is used
    up. Without a ledger it is kept in memory.

    Args:
        fault: "raise", "wrong_shape", "wrong_dtype", "missing_key", "not_finite_reward" (steps
            only), "never_answer", "exit" (code 3), "kill" (SIGKILL), "stop" (SIGSTOP), "ask" (reads
            a line from stdin), "leak" (keeps 32 MiB).
        at_step: 0 is the reset, 1 the first control step.
        times: number of faults before the environment works.
        ledger: an existing folder, or None.
        task_id, step_limit: as in `ToyReachEnv`.
    """

    def __init__(
        self,
        fault: str,
        at_step: int = 1,
        times: int = 1,
        ledger: str | None = None,
        task_id: int | None = None,
        step_limit: int = 40,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(task_id=task_id, step_limit=step_limit, render_mode=render_mode)
        self._fault = Fault(fault)
        self._at_step = at_step
        self._times = times
        self._ledger = None if ledger is None else Path(ledger)
        self._happened = 0
        self._kept: list[np.ndarray] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode, or fail."""
        observation, info = super().reset(seed=seed, options=options)
        if self._at_step == 0 and self._is_due():
            observation = self._misbehave(observation)
        return observation, info

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Move the hand, or fail."""
        observation, reward, terminated, truncated, info = super().step(action)
        if self._num_steps == self._at_step and self._is_due():
            observation = self._misbehave(observation)
            if self._fault is Fault.NOT_FINITE_REWARD:
                reward = float("nan")
        return observation, reward, terminated, truncated, info

    def _is_due(self) -> bool:
        happened = self._happened if self._ledger is None else len(list(self._ledger.iterdir()))
        if happened >= self._times:
            return False
        self._happened += 1
        if self._ledger is not None:
            (self._ledger / f"{self._fault.value}-{happened}-{os.getpid()}").touch()
        return True

    def _misbehave(self, observation: Observation) -> Observation:
        match self._fault:
            case Fault.RAISE:
                raise RuntimeError("the simulator lost its mind, as it was told to")
            case Fault.WRONG_SHAPE:
                return {**observation, "image": observation["image"][:-4]}
            case Fault.WRONG_DTYPE:
                return {**observation, "state": observation["state"].astype(np.float64)}
            case Fault.MISSING_KEY:
                return {key: value for key, value in observation.items() if key != "instruction"}
            case Fault.NEVER_ANSWER:
                threading.Event().wait()
            case Fault.EXIT:
                os._exit(3)
            case Fault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.STOP:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Fault.ASK:
                input("Do you want to specify a custom path for the dataset folder? (Y/N): ")
            case Fault.LEAK:
                self._kept.append(np.ones(2**25, np.uint8))
            case Fault.NOT_FINITE_REWARD:
                pass
        return observation
