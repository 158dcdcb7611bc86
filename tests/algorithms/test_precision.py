"""Losses are computed in float32 at least."""

import pytest
import torch

from vla_rl.algorithms.precision import full_precision


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_and_keeps_its_gradient(half: torch.dtype) -> None:
    tensor = torch.tensor([1.5, -2.0], dtype=half, requires_grad=True)
    found = full_precision(tensor)
    assert found.dtype is torch.float32
    assert found.tolist() == [1.5, -2.0]
    (found * 3.0).sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_other_tensors_stay_themselves(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, dtype=dtype)
    assert full_precision(tensor) is tensor
