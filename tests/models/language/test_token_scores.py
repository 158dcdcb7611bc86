"""Log-probs and entropies in chunks: the numbers of the whole, in memory that does not grow with
positions times vocabulary."""

from typing import Any

import pytest
import torch
from storage_bytes import StorageBytes
from torch import Tensor, nn

from vla_rl.models.language.rows import score_tokens

WIDTH = 16
META = torch.device("meta")


def learnt(num: int, vocab_size: int, at_once: int, device: torch.device, **given: Any) -> Any:
    """Score `num` tokens and learn from both results; return them, and the gradients."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, vocab_size, bias=False, device=device)
    hidden = torch.randn(num, WIDTH, device=device).requires_grad_()
    chosen = torch.randint(vocab_size // 2, (num,), device=device)
    temperatures = torch.linspace(0.5, 1.5, num, device=device)
    forbidden = given.get("forbidden", lambda first, end: None)
    found = score_tokens(
        head, hidden, chosen, temperatures, forbidden,
        vocab_size=vocab_size, logits_at_once=at_once,
    )  # fmt: skip
    (found[0].sum() - 0.3 * found[1].square().sum()).backward()
    return *found, hidden.grad, head.weight.grad


@pytest.mark.parametrize("num", [1, 7, 12])
def test_chunks_give_the_numbers_and_gradients_of_the_whole(num: int) -> None:
    def forbidden(first: int, end: int) -> Tensor:
        place = torch.arange(first, end)[:, None]
        return (torch.arange(50) > 25) & (place % 3 == 0)

    cpu = torch.device("cpu")
    whole = learnt(num, 50, 10_000, cpu, forbidden=forbidden)
    parts = learnt(num, 50, 4 * 50, cpu, forbidden=forbidden)
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def most_bytes(num: int, vocab_size: int, at_once: int) -> int:
    # on the meta device, where 8,192 positions of 152,000 tokens cost nothing
    with StorageBytes() as memory:
        learnt(num, vocab_size, at_once, META)
    return memory.most


def test_memory_does_not_grow_with_positions_times_vocabulary() -> None:
    logits = 4 * 8192 * 152_000
    grown = most_bytes(8192, 152_000, 1 << 26) - most_bytes(1024, 152_000, 1 << 26)
    assert grown < 0.01 * logits
    assert most_bytes(8192, 152_000, 1 << 40) > 4 * logits
