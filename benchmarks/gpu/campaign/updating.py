"""One update of the 7B: seconds, MFU, and the memory at its peak against the estimate.

The rows of a micro-batch are as many as the estimate allows on this GPU, at most 32. The first
update is not measured: it makes the optimizer's state, and counts the arithmetic, with uncompiled
blocks. With compiled ones the second, which compiles, is not measured either.

Keys:
    rows, decisions         rows of a micro-batch; decisions of the update
    seconds, decisions_per_s
    peak_tflops             of the data sheet; of a measured product, if the GPU is not known
    mfu                     arithmetic of the update, recomputation included, as a share of the
                            peak; goal >= 0.45 without recomputation, compiled or not
    log_prob_gap            mean difference between the learner's log-probs and the engine's
    estimated_gib, peak_gib tensors at the peak, by `learning.gpu_memory` and by CUDA's allocator
    memory_error            relative error of the estimate; goal within 0.05
    fragmentation           what the allocator holds and cannot use, as a share of the peak
    context_gib             CUDA's context and libraries
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from benchmarks.gpu.campaign.machine import peak_flops
from benchmarks.gpu.campaign.target import Target, recorded
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.learner.estimates.device import GIB, GpuEstimate, estimate_gpu
from vla_rl.learner.estimates.rank_memory import measure_network
from vla_rl.learner.estimates.traced_pass import trace_kept
from vla_rl.learner.flops import TERA
from vla_rl.models.example_inputs import example_row
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.run.update_metrics import Utilization

RANK: Final = 32
"""Rank of the adapters."""

ROWS: Final = (32, 16, 8, 4, 2, 1)

NUM_EPISODES: Final = 8

NUM_STEPS: Final = 16
"""Decisions of an episode."""


@dataclass(frozen=True)
class Update:
    """One way to train the policy."""

    adapters: bool
    recomputes: bool
    compiles: bool = False


WAYS: Final = {
    "update_recomputed": Update(adapters=True, recomputes=True),
    "update_kept": Update(adapters=True, recomputes=False),
    "update_compiled": Update(adapters=True, recomputes=False, compiles=True),
    "update_all_weights": Update(adapters=False, recomputes=True),
}
"""Updates by the name of their stage."""


def measure(target: Target, way: Update) -> Iterator[tuple[str, object]]:
    """Estimate the update, refuse it if it does not fit, and measure it."""
    policy = target.policy(RANK if way.adapters else None)
    if way.recomputes:
        policy.recompute_activations()
    if way.compiles:
        policy.compile_blocks()
    rows, estimate = largest_that_fits(target, policy, recomputes=way.recomputes)
    yield "rows", rows
    yield "estimated_gib", estimate.tensors / GIB
    peak = peak_flops(target)
    yield "peak_tflops", peak / TERA
    if target.is_gpu:
        torch.cuda.empty_cache()
    yield from asyncio.run(run(target, policy, rows, peak)).items()
    if target.is_gpu:
        yield from memory(target, estimate)


def largest_that_fits(
    target: Target, policy: OpenVlaOft, *, recomputes: bool
) -> tuple[int, GpuEstimate]:
    """Return the rows of a micro-batch and the estimate. Raises: ConfigError if one does not fit."""
    row = example_row(policy)
    assert row is not None
    kept, size = trace_kept(policy, row.batch, row.tokens), measure_network(policy.network)
    available = target.available_bytes()
    estimates = {
        rows: estimate_gpu(size, LearnerConfig(micro_batch=rows), kept, recomputes=recomputes)
        for rows in ((2,) if target.is_tiny else ROWS)
    }
    for rows, estimate in estimates.items():
        if estimate.total <= available:
            return rows, estimate
    rows, least = estimates.popitem()
    least.require_fit(available, remedy="several GPUs or a larger one are needed")
    return rows, least


async def run(target: Target, policy: OpenVlaOft, rows: int, peak: float) -> dict[str, float]:
    """Update twice, or three times if blocks are compiled, and measure the last."""
    num_episodes, num_steps = (2, 2) if target.is_tiny else (NUM_EPISODES, NUM_STEPS)
    config = LearnerConfig(
        micro_batch=rows,
        # the weights stay those that decided, and rounding in bfloat16 is reported, not refused
        optimizer=OptimizerConfig(lr=1e-12, warmup_steps=0),
        max_mismatch=10.0,
    )
    async with DeviceLane() as lane:
        episodes = await recorded(policy, lane, num_episodes, num_steps)
        advantages = [1.0 if number % 2 else -1.0 for number in range(num_episodes)]
        measured, learner = Utilization(lane, peak), Learner(policy, lane, config)
        first = await learner.update(episodes, advantages)
        if policy.compiles_blocks:
            await learner.update(episodes, advantages)
        target.finish()
        measured.metrics()
        if target.is_gpu:
            torch.cuda.reset_peak_memory_stats(target.device)
        began = time.perf_counter()
        await learner.update(episodes, advantages)
        target.finish()
        seconds, decisions = time.perf_counter() - began, num_episodes * num_steps
        return {
            "decisions": decisions,
            "seconds": seconds,
            "decisions_per_s": decisions / seconds,
            "mfu": measured.metrics()["device/mfu"],
            "log_prob_gap": first.metrics["update/log_prob_gap_mean"],
        }


def memory(target: Target, estimate: GpuEstimate) -> Iterator[tuple[str, object]]:
    """Compare the peak of the last update with the estimate."""
    tensors, held = (
        torch.cuda.max_memory_allocated(target.device),
        torch.cuda.max_memory_reserved(target.device),
    )
    free, total = torch.cuda.mem_get_info(target.device)
    yield "peak_gib", tensors / GIB
    yield "memory_error", estimate.tensors / tensors - 1.0
    yield "fragmentation", held / tensors - 1.0
    # other programs' memory is in it; the stage `machine` warns of them
    yield "context_gib", (total - free - torch.cuda.memory_reserved(target.device)) / GIB
