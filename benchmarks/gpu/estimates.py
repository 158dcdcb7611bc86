"""Figures of the estimates, for `python -m benchmarks.gpu`: the error of the memory estimate, and
whether a run's utilization is measured and its least seconds are known.

Keys of the last line:
    memory_estimate_error   relative error of the memory estimate against torch's tracker; goal <= .05
    mfu_estimate_present    1 if the roofline and the utilization of a pass are there
"""

import asyncio
from functools import partial

import torch

from benchmarks.gpu.tracked_memory import Compared, compare_public
from vla_rl.engines import DeviceLane
from vla_rl.learner.estimates.device import Workload, roofline
from vla_rl.learner.flops import find_device_peak
from vla_rl.models.example_inputs import example_row
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import tiny
from vla_rl.run.update_metrics import Utilization

REFERENCE = "NVIDIA H100 80GB HBM3"


def estimate_figures(*, is_tiny: bool) -> dict[str, float]:
    """Return `memory_estimate_error` and `mfu_estimate_present`; the whole 7B takes half a minute,
    the tiny form has its widths and two layers.
    """
    compared = compare_public(is_tiny=is_tiny)
    return {
        "memory_estimate_error": round(abs(compared.error), 4),
        "mfu_estimate_present": float(
            has_least_seconds(compared) and asyncio.run(has_utilization())
        ),
    }


def has_least_seconds(compared: Compared) -> bool:
    """Return whether the roofline of an OpenVLA-OFT is bound by compute, at more than 10 TFLOPs an
    update.
    """
    peak = find_device_peak(REFERENCE)
    assert peak is not None
    work = Workload(decisions=512, epochs=1, steps=1, acting_rows=32, recomputes=False)
    least = roofline(compared.traced, compared.size, work, peak)
    return least.binds == "compute" and 0.0 < least.acting_s < least.learning_s < least.seconds


async def has_utilization() -> bool:
    """Return whether a policy's pass on a device lane gives a utilization in (0, 1)."""
    model = OpenVlaOft.create(tiny(), seed=0)
    row = example_row(model)
    assert row is not None
    async with DeviceLane(1) as lane:
        measured = Utilization(lane, peak_flops=1e15)
        compute = partial(model.log_probs, temperatures=torch.ones(1))
        await lane.run(compute, row.batch, row.tokens, work="update")
        metrics = measured.metrics()
    return all(0.0 < metrics[name] < 1.0 for name in ("device/mfu", "device/mfu_update"))
