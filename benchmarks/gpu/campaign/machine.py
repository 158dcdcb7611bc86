"""The machine: what its GPU is, who else uses it, and its measured limits.

Keys:
    product_tflops            10^12 operations a second of a large bfloat16 product
    copy_gb_s, to_device_gb_s 10^9 bytes a second of a copy on the device, and from pinned memory
"""

from collections.abc import Iterator
from typing import Final

import torch

from benchmarks.gpu.campaign.target import Target
from vla_rl.cli.doctor.machine import Machine, gpus_in_use
from vla_rl.engines.device_lane import to_device
from vla_rl.learner.estimates.device import GIB
from vla_rl.learner.flops import TERA, find_device_peak

SIDE: Final = 8192
TINY_SIDE: Final = 128


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Describe the device and measure its limits."""
    yield "device", device_name(target)
    yield "cuda", torch.version.cuda
    if target.is_gpu:
        about = torch.cuda.get_device_properties(target.device)
        yield "memory_gib", about.total_memory / GIB
        yield "capability", f"{about.major}.{about.minor}"
        # this process has allocated nothing yet but its context
        yield "warnings", [str(each) for each in gpus_in_use(Machine())]
    peak = find_device_peak(device_name(target))
    yield "peak_tflops", None if peak is None else peak.flops / TERA
    yield "product_tflops", product_rate(target) / TERA
    yield from copy_rates(target)


def device_name(target: Target) -> str:
    """Return the GPU's name, or `cpu`."""
    return torch.cuda.get_device_name(target.device) if target.is_gpu else "cpu"


def product_rate(target: Target) -> float:
    """Measure the operations a second of a large bfloat16 product."""
    side, repeats = (TINY_SIDE, 2) if target.is_tiny else (SIDE, 50)
    one, two = (
        torch.randn(side, side, device=target.device, dtype=torch.bfloat16) for _ in range(2)
    )
    target.seconds_of(lambda: one @ two, 3)
    return 2 * side**3 / target.seconds_of(lambda: one @ two, repeats)


def copy_rates(target: Target) -> Iterator[tuple[str, object]]:
    """Measure copies on the device and from the host."""
    num_bytes = 1 << (20 if target.is_tiny else 30)
    one, two = (torch.zeros(num_bytes, dtype=torch.uint8, device=target.device) for _ in range(2))
    target.seconds_of(lambda: one.copy_(two))
    yield "copy_gb_s", num_bytes / target.seconds_of(lambda: one.copy_(two), 5) / 1e9
    if target.is_gpu:
        host = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
        target.seconds_of(lambda: to_device(host, target.device))
        seconds = target.seconds_of(lambda: to_device(host, target.device), 5)
        yield "to_device_gb_s", num_bytes / seconds / 1e9


def peak_flops(target: Target) -> float:
    """Return the data sheet's operations a second; a measured product's if it is not known."""
    peak = find_device_peak(device_name(target))
    return product_rate(target) if peak is None else peak.flops
