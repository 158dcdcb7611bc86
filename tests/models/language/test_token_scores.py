"""Log-probs and entropies in chunks: the numbers of the whole, in memory that does not grow with
positions times vocabulary."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vla_rl.errors import ConfigError
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.language.token_scores import score_tokens

WIDTH = 16
META = torch.device("meta")


class Memory(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, and notes the most, and the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = self.largest = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        number, size = storage._cdata, storage.nbytes()
        self._known[number] = weakref.ref(storage, lambda _: self._forget(number, size))
        self.alive += size
        self.most, self.largest = max(self.most, self.alive), max(self.largest, size)

    def _forget(self, number: int, size: int) -> None:
        del self._known[number]
        self.alive -= size


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
    with Memory() as memory:
        learnt(num, vocab_size, at_once, META)
    return memory.most


def test_memory_does_not_grow_with_positions_times_vocabulary() -> None:
    logits = 4 * 8192 * 152_000
    grown = most_bytes(8192, 152_000, 1 << 26) - most_bytes(1024, 152_000, 1 << 26)
    assert grown < 0.01 * logits
    assert most_bytes(8192, 152_000, 1 << 40) > 4 * logits


SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=2048,
)


@pytest.fixture(scope="module")
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["one two"], seed=0)


def scored(policy: CausalLanguageModel, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Score replies of two tokens to prompts of these lengths."""
    prompts = [{"prompt_tokens": torch.arange(length).numpy() % 250 + 10} for length in lengths]
    tokens = torch.tensor([[20, 21]] * len(lengths))
    with torch.no_grad():
        return policy.log_probs(policy.prepare(prompts), tokens, torch.ones(len(lengths)))


def test_rows_are_packed_without_a_mask_of_the_square_of_their_line(
    policy: CausalLanguageModel,
) -> None:
    lengths = [1000, *range(20, 40)]
    with Memory() as memory:
        found, _ = scored(policy, lengths)
    assert memory.largest < 1000 * 1000  # the bytes of such a mask
    alone = torch.cat([scored(policy, [length])[0] for length in lengths])
    torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)


def test_a_network_that_drops_the_packing_is_refused(policy: CausalLanguageModel) -> None:
    deaf: Any = policy.copy()
    deaf.network.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="would see each other"):
        scored(deaf, [9, 3, 3])
