"""vLLM's client as replicas use it, over a process that does nothing: it fails, waits and tells as
a test wants.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from vla_rl.engines.vllm import VllmConfig, adapter
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.served import EngineLayout, EngineRequest


class FakeLlm:
    """One engine.

    Attributes:
        fails: methods whose call fails, as vLLM 0.32 tells it: by a plain `Exception`.
        dies_at: methods of its process that end that process, and are never answered.
        stops_at: methods of its process that stop that process, and are never answered.
        hangs_at: methods of its process that are never answered, though it runs.
        process: started by `start`.
        done: methods that were called, in order.
        drained: set where nothing is being answered.
    """

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.dies_at: set[str] = set()
        self.stops_at: set[str] = set()
        self.hangs_at: set[str] = set()
        self.done: list[str] = []
        self.drained = asyncio.Event()
        self.drained.set()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self._do(method)
        await self._fall_silent(method)
        return [self.process.pid] if method == "process_id" else [0]

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self._do("pause")
        if mode == "wait":
            await self.drained.wait()

    async def resume_generation(self) -> None:
        self._do("resume")

    async def update_weight_version(self, version: str) -> None:
        self._do(f"version {version}")

    async def sleep(self, level: int) -> None:
        self._do("sleep")

    async def wake_up(self) -> None:
        self._do("wake")

    async def encode(self, prompt: object, parameters: object, name: str) -> AsyncIterator[Any]:
        try:
            self._do("ask")
        except Exception as error:
            raise adapter.EngineGenerateError from error
        await self._fall_silent("ask")
        yield SimpleNamespace(outputs=SimpleNamespace(data=torch.zeros(3, 1)))

    def shutdown(self, timeout_s: float) -> None:
        self.process.kill()
        self.process.wait()

    async def _fall_silent(self, what: str) -> None:
        if what in self.dies_at:
            self.process.kill()
        if what in self.stops_at:
            self.process.send_signal(signal.SIGSTOP)
        if what in self.dies_at | self.stops_at | self.hangs_at:
            await asyncio.Event().wait()

    def _do(self, what: str) -> None:
        self.done.append(what)
        if what in self.fails:
            raise Exception(f"Call to {what} method failed: out of memory")


class FakeReplica(Replica):
    """A replica whose engine is a `FakeLlm`."""

    def __init__(self, name: str, config: VllmConfig) -> None:
        super().__init__(name, _Served(), config, Path("unused"))
        self.llm = FakeLlm()

    def _build(self) -> None:
        self.llm.start()
        self._llm = self.llm


class _Served:
    layout = EngineLayout(
        config={}, runner="pooling", context_size=8, num_tokens=1, allowed_tokens=(5,)
    )
    network = torch.nn.Linear(1, 1)

    def tensors(self, network: torch.nn.Module) -> dict[str, torch.Tensor]:
        return dict(network.state_dict())

    def sample_request(self) -> EngineRequest:
        return EngineRequest([1, 2, 3])


def weights(version: int) -> dict[str, torch.Tensor]:
    """One tensor that says which version it is."""
    return {"weight": torch.full((4,), float(version))}
