"""Copies between host and device: pinned and asynchronous one way, all in one the other way."""

import inspect
from typing import Any

import pytest
import torch
from torch.overrides import get_testing_overrides

from vla_rl.engines.device_lane import to_device, to_host

META = torch.device("meta")


class HostTensor:
    """A tensor on the host, of which only the calls of `to_device` exist; it notes them."""

    device = torch.device("cpu")

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def pin_memory(self) -> "HostTensor":
        self._noted.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> "HostTensor":
        self._noted.append(f"{device.type}, non_blocking={non_blocking}")
        return self


def test_a_copy_to_a_gpu_is_pinned_and_asynchronous() -> None:
    noted: list[str] = []
    tensor: Any = HostTensor(noted)
    to_device(tensor, torch.device("cuda"))
    assert noted == ["pinned", "cuda, non_blocking=True"]


def test_torch_has_the_calls_that_stand_ins_replace() -> None:
    known = get_testing_overrides()
    inspect.signature(known[torch.Tensor.pin_memory]).bind(torch.zeros(1))
    torch.zeros(1).to(META, non_blocking=True)


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert to_host(tensor)[0] is tensor


def test_numbers_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([[2**62 + 1, -1]]),
        torch.tensor(0.1),
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    ]
    # as on a device, whose tensors are not the host's
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: META))
    found = to_host(*tensors)
    monkeypatch.undo()
    for sent, arrived in zip(tensors, found, strict=True):
        assert arrived.dtype == sent.dtype
        assert torch.equal(arrived, sent)
