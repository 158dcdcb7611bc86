"""Upper limits of devices by name: arithmetic in bfloat16, and bandwidth of their memory.

Figures are the makers' published ones as we know them, dense (without sparsity), with float32
accumulation. They were not compared with the data sheets line by line: `--run.peak-tflops` gives
the value of your own.
"""

from typing import Final, NamedTuple

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


def peak_of(name: str) -> DevicePeak | None:
    """Return the peak of the device that CUDA or `nvidia-smi` calls `name`; None if unknown."""
    words = f"{name} "
    for part, teraflops, terabytes in _PEAKS:
        position = words.find(part)
        # L4 is not a part of L40: the next character ends the name
        if position >= 0 and not words[position + len(part)].isalnum():
            return DevicePeak(teraflops * TERA, terabytes * TERA)
    return None
