"""The device that a stage measures, and policies of the size that suits it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.policy_sizes import make_observation, make_policy
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import ConfigError
from vla_rl.learner.estimates.device import GIB, CudaOverheads
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.reporting.machine import available_bytes
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, Step, StopReason, Trajectory

WEIGHT_BYTES: Final = 2 * 7_541_237_184
"""Weights of the 7B in bfloat16."""


@dataclass(frozen=True)
class Target:
    """One device, and the size of what runs on it."""

    device: torch.device
    is_tiny: bool
    """A policy of 1.4 million parameters and fractions of seconds, for tests; else 7.5 billion."""

    folder: Path
    """Folder for traces and for what earlier stages found."""

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def policy(self, rank: int | None = None, *, copies: int = 1) -> OpenVlaOft:
        """Make an OpenVLA-OFT with random weights on the device, in the public 7B's shape; with
        adapters of a rank, or none.

        Raises: ConfigError if `copies` of it do not fit, before anything is allocated.
        """
        needed, available = copies * WEIGHT_BYTES, self.available_bytes()
        if not self.is_tiny and needed > available:
            raise ConfigError(
                f"the weights need {copies} x {WEIGHT_BYTES / GIB:.1f} = {needed / GIB:.1f} > "
                f"{available / GIB:.1f} GiB that are free; end other programs (`nvidia-smi` lists "
                "them), or take a larger GPU"
            )
        # not by `adapted`, which builds the network in float32 on the host first: 30 GB of it
        lora = None if rank is None else LoraConfig(rank=rank)
        return make_policy("tiny" if self.is_tiny else "7b", self.device, lora)

    def compiler(self) -> AbstractContextManager[object]:
        """Return the compiler of blocks, for use in `with`: inductor, or for the tiny size one that
        only traces, because inductor's kernels for a CPU take minutes.
        """
        if not self.is_tiny:
            return nullcontext()
        compiler: AbstractContextManager[object] = torch.compiler.set_stance(
            "default", force_backend="eager"
        )
        return compiler

    def available_bytes(self) -> int:
        """Return the bytes that this process has or can get; those of other programs are not."""
        if not self.is_gpu:
            return available_bytes()
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) + CudaOverheads().context

    def finish(self) -> None:
        """Wait for all work of the device."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, run: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one run, after all work of the device."""
        self.finish()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        self.finish()
        return (time.perf_counter() - began) / repeats


async def recorded(
    policy: OpenVlaOft, lane: DeviceLane, num_episodes: int, num_steps: int
) -> list[Trajectory]:
    """Make episodes of noise in which the policy decides, by the engine of a run."""
    config = EngineConfig(max_batch=8, cuda_graphs=False)

    async def episode(number: int) -> Trajectory:
        steps = []
        for step in range(num_steps):
            seed = number * num_steps + step
            seen = make_observation(policy.config, seed)
            chunk = await engine.act(seen, Sampling(seed=seed))
            rewards = np.zeros(len(chunk.actions), np.float32)
            steps.append(Step(observation=seen, chunk=chunk, rewards=rewards))
        spec = EpisodeSpec(
            episode_id=number,
            group_id=0,
            member=number,
            env=EnvSpec(id="noise"),
            task="noise",
            seed=0,
            policy_seed=0,
        )
        return Trajectory(
            episode=spec,
            steps=tuple(steps),
            final_observation=steps[-1].observation,
            stop_reason=StopReason.TIME_LIMIT,
        )

    async with TorchActionEngine(policy, lane, config) as engine:
        return list(await asyncio.gather(*(episode(number) for number in range(num_episodes))))
