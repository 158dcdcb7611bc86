"""vLLM engines of a policy that acts, shared by the tests that need no engine of their own: starting one
takes 9 s of CPU time.
"""

import asyncio
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from small_policies import moved, observe, token_policy

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmActionEngine, VllmConfig, adapter
from vla_rl.models.openvla import OpenVla
from vla_rl.models.vllm import serve
from vla_rl.types import ActionChunk, Sampling

BEGINNING = 5
"""Version of the weights that engines begin with."""


def state_of_this_process() -> dict[str, object]:
    return {
        "variables": dict(os.environ),
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
        "torch": torch.get_rng_state().tolist(),
    }


class Team:
    """Engines of a policy that acts behind one door, in an empty folder for temporary files.

    They begin with `newer`, as weights of version 5.
    """

    def __init__(self, lane: DeviceLane, folder: Path, num_engines: int) -> None:
        hour = 3600.0  # no deadline finds an engine that stands still
        vllm = VllmConfig(
            num_engines=num_engines,
            update_mode="drain",
            health_every_s=hour,
            update_timeout_s=hour,
            verify_checksums=True,
        )
        self.lane, self.folder, self.num_engines = lane, folder, num_engines
        self.first, self.newer = token_policy(), moved(token_policy(), 3)
        self.engine = VllmActionEngine(serve(self.first), lane, EngineConfig(vllm=vllm))
        self.answers: list[tuple[int, ActionChunk]] = []
        self.changed_by_start: list[str] = []

    async def open(self) -> None:
        await self.publish(self.newer, BEGINNING)
        with pytest.raises(RuntimeError, match="not open"):
            await self.engine.act(observe(0))
        drawn = random.getstate()
        assert adapter.AsyncLLM  # vLLM's first import sets variables
        assert random.getstate() == drawn
        before = state_of_this_process()
        await self.engine.__aenter__()
        after = state_of_this_process()
        self.changed_by_start = [name for name in before if before[name] != after[name]]

    async def close(self) -> None:
        await self.engine.__aexit__(None, None, None)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    async def publish(self, policy: OpenVla, version: int) -> None:
        await self.lane.run(self.engine.apply_weights, policy.network, version)

    async def ask(self, number: int) -> None:
        self.answers.append((number, await self.engine.act(observe(number), Sampling(seed=number))))

    async def ask_until(self, is_over: Callable[[], bool], num_callers: int = 4) -> None:
        """Keep asking; every single question has to be answered."""

        async def keep_asking(number: int) -> None:
            while not is_over():
                await self.ask(number)
                await asyncio.sleep(0.25)  # leaves the cores to the engine that starts

        async with asyncio.TaskGroup() as tasks:
            for number in range(num_callers):
                tasks.create_task(keep_asking(number))


@asynccontextmanager
async def opened_team(num_engines: int) -> AsyncIterator[Team]:
    """Open engines, and close them if the block did not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as own:  # a short path, as sockets need
        async with DeviceLane(1) as lane:
            team = Team(lane, Path(own), num_engines)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tempfile, "tempdir", own)
                await team.open()
            try:
                yield team
            finally:
                if team.files():
                    await team.close()


class OneEngine:
    """One engine for all tests of a session; a test that ends it must be the last that asks."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._team: Team | None = None

    async def opened(self) -> Team:
        """Return the engine, opened at the first call."""
        if self._team is None or not self._team.files():
            self._team = await self._stack.enter_async_context(opened_team(1))
        return self._team
