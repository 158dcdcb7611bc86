"""A device is known by the name that CUDA or `nvidia-smi` gives it."""

import pytest

from vla_rl.learner.flops import TERA, DevicePeak, find_device_peak


@pytest.mark.parametrize(
    ("name", "teraflops", "terabytes"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA GH200 480GB", 990, 4.0),
        ("NVIDIA GB200", 2500, 8.0),
        ("NVIDIA B200", 2250, 8.0),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA A100-SXM4-80GB", 312, 2.039),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA L40S", 362, 0.864),
        ("NVIDIA GeForce RTX 4090", 165, 1.008),
    ],
)
def test_a_longer_name_is_not_taken_for_a_shorter_one(
    name: str, teraflops: float, terabytes: float
) -> None:
    assert find_device_peak(name) == DevicePeak(teraflops * TERA, terabytes * TERA)


@pytest.mark.parametrize("name", ["NVIDIA L40", "Tesla T4", ""])
def test_another_device_has_no_known_peak(name: str) -> None:
    assert find_device_peak(name) is None
