"""GPUs that cannot be used are named: each test makes one fault happen."""

from collections.abc import Callable

import pytest
import torch
from faults import PATIENT, words

from vla_rl.cli.doctor import (
    findings_at_start,
    gpu,
)


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a build of torch without CUDA")
def test_a_cpu_build_of_torch_on_a_machine_with_gpus_is_named(
    smi: Callable[[str, int], None],
) -> None:
    smi("NVIDIA H100 80GB HBM3, 81559, 81000", 0)
    assert "is a build without CUDA, and this machine has 1 GPU" in words(gpu.gpus(PATIENT))


def test_a_gpu_that_others_use_is_named_also_at_a_recipes_start(
    smi: Callable[[str, int], None],
) -> None:
    smi("NVIDIA H100 80GB HBM3, 81559, 40000", 0)
    assert "GiB in use by other programs" in words(gpu.gpus(PATIENT))
    assert "GPU 0 (NVIDIA H100 80GB HBM3)" in words(findings_at_start(PATIENT))


def test_a_driver_that_does_not_answer_is_named(smi: Callable[[str, int], None]) -> None:
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9)
    assert "couldn't communicate with the NVIDIA driver" in words(gpu.gpus(PATIENT))


def test_a_driver_too_old_for_torch_is_named(
    smi: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    smi("NVIDIA A100-SXM4-80GB, 81920, 81900", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", refuse)
    found = words(gpu.gpus(PATIENT))
    assert "driver on your system is too old" in found
    assert "built for an older CUDA" in found
