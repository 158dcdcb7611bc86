"""A path that computes, run from its beginning to its end under a watch of all its threads."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.gpu.allowed_waits import ALLOWED
from benchmarks.gpu.crossings import (
    Crossings,
    describe,
    fused_optimizers_on_meta,
    unwatched,
    watching,
)
from vla_rl.algorithms import VJepa2Config
from vla_rl.engines import DeviceLane
from vla_rl.models import attention, vjepa2 as vjepa2_encoder
from vla_rl.models.openvla_oft import policy
from vla_rl.models.vjepa2 import load_encoder

Path: TypeAlias = Callable[["WatchedLane"], Awaitable[object]]


class WatchedLane(DeviceLane):
    """A device lane that watches all work, in both of its threads."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__(num_threads=1)
        self.crossings = crossings

    async def run(  # type: ignore[override]
        self, fn: Any, *args: Any, work: str = "other"
    ) -> Any:
        """Run work on the device thread, watched."""
        return await super().run(watching(self.crossings, fn), *args, work=work)

    async def prepare(self, fn: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run work on the host thread, watched."""
        return await super().prepare(watching(self.crossings, fn), *args)

    def prepare_ahead(self, fn: Any, inputs: Sequence[Any]) -> AsyncGenerator[Any, None]:
        """Prepare inputs on the host thread, watched."""
        return super().prepare_ahead(watching(self.crossings, fn), inputs)


def cross(path: Path) -> Crossings:
    """Run a path and return its crossings. Raises what the path raises."""
    crossings = Crossings()

    async def run() -> None:
        async with asyncio.timeout(60), WatchedLane(crossings) as lane:
            await path(lane)

    with (
        fused_optimizers_on_meta(),
        patch.object(policy, "NUM_DENOISING_STEPS", 2),  # 50 are as much work, and no other
        # as on a GPU: one kernel reads packed rows in half precision
        patch.object(attention, "takes_all_rows", lambda query: query.dtype == torch.bfloat16),
        patch.object(vjepa2_encoder, "load_encoder", _load_unwatched),
        crossings.watched(),
    ):
        asyncio.run(run())
    return crossings


def _load_unwatched(config: VJepa2Config) -> nn.Module:
    with unwatched():
        return load_encoder(config)


def not_allowed(crossings: Crossings) -> str:
    """Describe the crossings whose places are not allowed."""
    return describe([each for each in crossings.found if each.location not in ALLOWED])
