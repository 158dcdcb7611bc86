"""The driving world behind the asynchronous interfaces that other frameworks call.

`SteppedDriving` has reset and step, `ToolDriving` has tools. Both run the synchronous environment
in a thread of their own, so the loop never waits for a simulator.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import gymnasium
import numpy as np

from vla_rl.types import Info, Observation

T = TypeVar("T")


class SteppedDriving:
    """`await reset()`, `await step(action)`, `await get_state()`, `await load_state(state)`.

    Close it, or use it as an asynchronous context manager. Calls run one after another.

    Args:
        env_id: a driving environment, such as vla_rl/driving_waypoints-v0.
        kwargs: arguments of `gymnasium.make`.
    """

    def __init__(self, env_id: str, **kwargs: Any) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="driving")
        self._make: Callable[[], Any] = lambda: gymnasium.make(env_id, **kwargs).unwrapped
        self._env: Any = None

    async def __aenter__(self) -> "SteppedDriving":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode."""
        if self._env is None:
            self._env = await self._run(self._make)
        started: tuple[Observation, Info] = await self._run(
            lambda: self._env.reset(seed=seed, options=options)
        )
        return started

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one action. Raises: RuntimeError before the first `reset`."""
        self._require_env()
        stepped: tuple[Observation, float, bool, bool, Info] = await self._run(
            lambda: self._env.step(np.asarray(action, np.float32))
        )
        return stepped

    async def get_state(self) -> dict[str, Any]:
        """Return all state that later steps depend on, as plain values."""
        self._require_env()
        state: dict[str, Any] = await self._run(lambda: self._env.get_state())
        return state

    async def load_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, here or elsewhere."""
        if self._env is None:
            await self.reset(seed=0)
        seen: Observation = await self._run(lambda: self._env.set_state(state))
        return seen

    async def close(self) -> None:
        """Close the environment and end its thread."""
        if self._env is not None:
            await self._run(self._env.close)
            self._env = None
        self._thread.shutdown()

    def _require_env(self) -> None:
        if self._env is None:
            raise RuntimeError("the environment has no episode yet; await reset() first.")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class ToolDriving:
    """`await ainitialize()`, `list_tools()`, `await aexecute(name, arguments)`, `await aclose()`.

    The one tool, `drive`, takes an action and returns the observation, reward and ending.

    Args:
        env_id, kwargs: as `SteppedDriving`'s.
    """

    def __init__(self, env_id: str, **kwargs: Any) -> None:
        self._driving = SteppedDriving(env_id, **kwargs)

    async def ainitialize(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Observation:
        """Start an episode and return its first observation."""
        observation, _ = await self._driving.reset(seed, options)
        return observation

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools in the format of chat APIs."""
        number = {"type": "number", "minimum": -1, "maximum": 1}
        row = {"type": "array", "items": number}
        parameters = {
            "type": "object",
            "properties": {"action": {"anyOf": [row, {"type": "array", "items": row}]}},
            "required": ["action"],
        }
        about = "Drive by one action of the environment: its action space gives the shape."
        function = {"name": "drive", "description": about, "parameters": parameters}
        return [{"type": "function", "function": function}]

    async def aexecute(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a tool. Raises: ValueError for another tool, or without an action."""
        if name != "drive" or "action" not in arguments:
            raise ValueError(
                f"the tool is {name!r} with {sorted(arguments)}, expected 'drive' with 'action'."
            )
        action = np.asarray(arguments["action"], np.float32)
        observation, reward, terminated, truncated, info = await self._driving.step(action)
        return {
            "observation": observation,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "info": info,
        }

    async def aclose(self) -> None:
        """Close the environment."""
        await self._driving.close()
