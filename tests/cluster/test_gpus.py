"""The GPUs of a host, from the lines of nvidia-smi and CUDA_VISIBLE_DEVICES."""

import pytest

from vla_rl.cluster import Gpu
from vla_rl.cluster.gpus import visible_gpus

LISTED = """0, GPU-aaa, NVIDIA H200, 143771
1, GPU-bbb, NVIDIA H200, 143771
2, GPU-ccc, NVIDIA L4, 23034
3, GPU-ddd, NVIDIA GB10, [N/A]
"""


def test_a_gpu_has_a_name_its_memory_and_its_number() -> None:
    first, *_, last = visible_gpus(LISTED, None)
    assert first == Gpu(name="NVIDIA H200", memory_bytes=143771 << 20, device="0")
    # the fourth does not report its memory
    assert (last.name, last.device) == ("NVIDIA L4", "2")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("1,9,2", ["1"]), ("", []), ("-1", [])],
)
def test_only_the_gpus_that_cuda_shows_are_used_in_its_order(
    visible: str, expected: list[str]
) -> None:
    assert [gpu.device for gpu in visible_gpus(LISTED, visible)] == expected


def test_a_machine_without_gpus_has_none() -> None:
    assert visible_gpus("", None) == ()
