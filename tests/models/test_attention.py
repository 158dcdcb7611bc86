"""Heads that share keys read them without a copy for each head."""

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from vla_rl.models import attention
from vla_rl.models.attention import attend

ROWS, HEADS, KEY_HEADS, LENGTH, SIZE = 5, 6, 2, 40, 16


@pytest.fixture
def heads() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return one query a row, keys and values in longer slots, and a mask of rows of some lengths."""
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, 1, HEADS, SIZE, generator=draw).transpose(1, 2)
    keys, values = (
        torch.randn(ROWS + 3, KEY_HEADS, LENGTH + 24, SIZE, generator=draw)[:ROWS, :, :LENGTH]
        for _ in range(2)
    )
    lengths = torch.tensor([1, 7, 40, 23, 2])
    mask = torch.arange(LENGTH)[None, None, None] < lengths[:, None, None, None]
    return query, keys, values, mask


def layer(num_groups: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.num_key_value_groups = num_groups  # type: ignore[assignment]
    module.config = types.SimpleNamespace(is_causal=True)  # type: ignore[assignment]
    return module.eval()


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_one_query_a_row_gets_what_transformers_computes_on_repeated_keys(
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    scaling: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = layer(HEADS // KEY_HEADS)
    expected, _ = sdpa_attention_forward(module, *heads, scaling=scaling)

    def refuse(*args: object, **given: object) -> None:
        raise AssertionError("keys were repeated for each head")

    monkeypatch.setattr(attention, "sdpa_attention_forward", refuse)
    found, _ = attend(module, *heads, scaling=scaling)
    assert found.shape == expected.shape == (ROWS, 1, HEADS, SIZE)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def several_queries(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return query.expand(-1, -1, 3, -1), mask.expand(-1, -1, 3, -1)


def mask_of_each_head(query: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    others = mask.expand(-1, HEADS, -1, -1).clone()
    others[:, 1:, :, 1:] = False
    return query, others


@pytest.mark.parametrize("change", [several_queries, mask_of_each_head])
def test_other_queries_and_masks_are_left_to_transformers(
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
) -> None:
    query, keys, values, mask = heads
    query, mask = change(query, mask)
    module = layer(HEADS // KEY_HEADS)
    expected, _ = sdpa_attention_forward(module, query, keys, values, mask)
    found, _ = attend(module, query, keys, values, mask)
    torch.testing.assert_close(found, expected)
