"""Arithmetic on a device: how much a job does, as a share of what the device could do.

    a job with new shapes  ─► runs under torch's counter, which takes a few times longer on the host
    a job with known ones  ─► runs as it is; its count is added

Lengths are rounded to multiples of 16, so that a run of texts meets few shapes. Peaks are the makers'
published figures as we know them, dense (without sparsity), with float32 accumulation. They were not
compared with the data sheets line by line: `--run.peak-tflops` gives the value of your own.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from inspect import unwrap
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

T = TypeVar("T")

ROUNDED_TO: Final = 16

UNCOUNTED: Final = frozenset({"generate", "checkpoint"})
"""Work whose arithmetic does not follow from its arguments: generation keeps conversations."""

_aten: Final = torch.ops.aten
CPU_ATTENTION: Final[Mapping[Any, Callable[..., int]]] = {
    # the counter wraps its formulas itself
    _aten._scaled_dot_product_flash_attention_for_cpu: unwrap(sdpa_flop),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: unwrap(sdpa_backward_flop),
}
"""Attention kernels that torch's counter leaves out: those of the CPU."""


def flop_counter() -> FlopCounterMode:
    """Return torch's counter, with the attention kernels of the CPU."""
    return FlopCounterMode(display=False, custom_mapping=dict(CPU_ATTENTION))


class LaneFlopCounter:
    """Observes a device lane and adds up the floating-point operations of its jobs.

    Args:
        counted: kinds of work to count; None counts all but `UNCOUNTED`.
        inner_mode: makes a mode that runs inside of the counter and decides what it sees.
    """

    def __init__(
        self,
        counted: Collection[str] | None = None,
        inner_mode: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._counted, self._inner_mode = counted, inner_mode
        self._known: dict[object, int] = {}
        self._done: dict[str, int] = {}

    def flops(self) -> dict[str, int]:
        """Return the operations since the lane was opened, by kind of work."""
        return dict(self._done)

    def wrap_job(self, work: str, job: "partial[T]") -> "partial[T]":
        """Return the job, which counts itself."""
        is_counted = work not in UNCOUNTED if self._counted is None else work in self._counted
        return partial(self._run, work, job) if is_counted else job

    def _run(self, work: str, job: "partial[T]") -> T:
        key = (work, getattr(job.func, "__qualname__", ""), _shapes(job.args))
        flops = self._known.get(key)
        if flops is None:
            with flop_counter() as counter, self._inner_mode():
                result = job()
            flops = self._known[key] = int(counter.get_total_flops())
        else:
            result = job()
        self._done[work] = self._done.get(work, 0) + flops
        return result


def _shapes(value: object) -> object:
    """Return what the arithmetic of a call depends on: the shapes in its arguments."""
    if isinstance(value, Tensor | np.ndarray):
        return tuple(-(-size // ROUNDED_TO) if size > ROUNDED_TO else size for size in value.shape)
    if isinstance(value, tuple | list):
        return tuple(_shapes(each) for each in value)
    if isinstance(value, Mapping):
        return tuple(_shapes(each) for each in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(_shapes(getattr(value, each.name)) for each in dataclasses.fields(value))
    return None


TERA: Final = 1e12


class DevicePeak(NamedTuple):
    """Upper limits of one device."""

    flops: float
    """Floating-point operations per second, bfloat16 on tensor cores."""

    bytes_per_s: float | None = None
    """Bytes of its memory read or written per second; None if unknown."""


_PEAKS: Final = (
    # the first name that is part of the device's counts, so a longer name stands before a shorter
    ("GB200", 2500, 8.0),
    ("B200", 2250, 8.0),
    ("GH200", 990, 4.0),
    ("H200 NVL", 835, 4.8),
    ("H200", 989, 4.8),
    ("H100 PCIe", 756, 2.0),
    ("H100 NVL", 835, 3.9),
    ("H100", 989, 3.35),
    ("H800 PCIe", 756, 2.0),
    ("H800", 989, 3.35),
    ("A100-SXM4-80GB", 312, 2.039),
    ("A100 80GB PCIe", 312, 1.935),
    ("A100", 312, 1.555),
    ("A800", 312, 2.039),
    ("L40S", 362, 0.864),
    ("L4", 121, 0.3),
    ("RTX A6000", 155, 0.768),
    ("RTX 4090", 165, 1.008),
    ("RTX 5090", 209, 1.792),
)
"""Part of the device's name, 10^12 operations per second, 10^12 bytes per second."""


def find_device_peak(name: str) -> DevicePeak | None:
    """Return the peak of the device that CUDA or `nvidia-smi` calls `name`; None if unknown."""
    padded = f"{name} "
    for part, teraflops, terabytes in _PEAKS:
        position = padded.find(part)
        # L4 is not a part of L40: the next character ends the name
        if position >= 0 and not padded[position + len(part)].isalnum():
            return DevicePeak(teraflops * TERA, terabytes * TERA)
    return None
