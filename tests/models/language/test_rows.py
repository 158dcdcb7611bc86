"""Rows have the numbers that each has alone, also if they share a prompt while learning.

On one line they are read by one kernel for all or by one for each; log-probs and entropies of chunks are those
of the whole, in memory that does not grow with the number of positions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from made_inputs import SIZES
from storage_bytes import StorageBytes
from tiny_vision import write_tiny_vision
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from benchmarks.conversations import chat
from vla_rl.engines import DeviceLane
from vla_rl.engines.policy_model import NO_TOKEN
from vla_rl.errors import ConfigError
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models import attention
from vla_rl.models.attention import takes_all_rows
from vla_rl.models.language import (
    CausalLanguageModel,
    TinyConfig,
    load_language_model,
    policy as policy_file,
    tiny,
)
from vla_rl.models.language.rows import score_tokens
from vla_rl.models.language.shared_prompts import share_prompts

LENGTHS = [1000, *range(20, 40)]

SQUARE = 1000 * 1000
"""Bytes of a mask of the longest row, the least that a mask of the line takes."""


@pytest.fixture(scope="module")
def policy() -> CausalLanguageModel:
    """A policy with more heads for queries than for keys and values."""
    shape = TinyConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=64,
        vocab_size=300,
        context_size=2048,
    )
    known = tiny(shape, ["one two"], seed=0)
    torch.manual_seed(0)
    config: Any = known.network.config
    sizes = {**config.to_dict(), "num_key_value_heads": 2}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return CausalLanguageModel(network, known._tokenizer, known.checkpoint_files())


def scored(policy: CausalLanguageModel, lengths: list[int]) -> Tensor:
    """Return the log-probs of replies of two tokens to prompts of these lengths."""
    prompts = [{"prompt_tokens": torch.arange(length).numpy() % 250 + 10} for length in lengths]
    tokens = torch.tensor([[20, 21]] * len(lengths))
    log_probs, _ = policy.log_probs(policy.prepare(prompts), tokens, torch.ones(len(lengths)))
    return log_probs


def learn_rows(policy: CausalLanguageModel, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return log-probs, and the gradient of all weights."""
    policy.network.zero_grad()
    log_probs = scored(policy, lengths)
    torch.autograd.backward(log_probs.sum())
    grads = [each.grad.flatten() for each in policy.network.parameters() if each.grad is not None]
    return log_probs.detach(), torch.cat(grads)


def dense_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    begins_of_keys: Tensor,
    longest: int,
    longest_keys: int,
    **options: Any,
) -> Tensor:
    """Compute with a mask of the line's square what the kernel of GPUs computes without one."""
    assert torch.equal(begins, begins_of_keys)
    assert longest == longest_keys == int(begins.diff().max())
    assert options.pop("window_size") == (-1, 0)
    assert ("enable_gqa" in options) == attention.HAS_GROUPED_HEADS
    position = torch.arange(len(query))
    row = torch.bucketize(position, begins[1:], right=True)
    sees = (row[:, None] == row) & (position <= position[:, None])
    found = nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in (query, key, value)), attn_mask=sees, **options
    )
    return found[0].transpose(0, 1)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], list[int]]:
    """Make all rows be read at once, by this kernel; each call must fit the real one."""
    calls: list[int] = []
    real = inspect.signature(varlen_attn)

    def make(kernel: Callable[..., Tensor]) -> list[int]:
        def called(*args: Any, **kwargs: Any) -> Tensor:
            real.bind(*args, **kwargs)
            calls.append(len(args[0]))
            return kernel(*args, **kwargs)

        monkeypatch.setattr(attention, "takes_all_rows", lambda query: True)
        monkeypatch.setattr(attention, "varlen_attn", called)
        return calls

    return make


def test_rows_on_one_line_give_what_each_gives_alone(policy: CausalLanguageModel) -> None:
    with torch.no_grad(), StorageBytes() as memory:
        found = scored(policy, LENGTHS)
    assert memory.largest < SQUARE
    with torch.no_grad():
        alone = torch.cat([scored(policy, [length]) for length in LENGTHS])
    torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("has_grouped_heads", [True, False])
def test_one_kernel_for_all_rows_gives_numbers_and_gradients_of_one_for_each(
    policy: CausalLanguageModel,
    at_once: Callable[[Callable[..., Tensor]], list[int]],
    has_grouped_heads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch 2.11's kernel has no such option
    monkeypatch.setattr(attention, "HAS_GROUPED_HEADS", has_grouped_heads)
    lengths = [40, 9, 3, 17]
    expected = learn_rows(policy, lengths)
    calls = at_once(dense_varlen)
    found = learn_rows(policy, lengths)
    assert calls == [sum(lengths) + 2 * len(lengths)] * 2  # once a layer
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-4)


def test_one_kernel_for_all_rows_needs_no_mask_of_their_line(
    policy: CausalLanguageModel, at_once: Callable[[Callable[..., Tensor]], list[int]]
) -> None:
    on_meta = policy.copy()
    on_meta.network.to("meta", torch.bfloat16)
    calls = at_once(varlen_attn)  # the real one, which has shapes for the meta device
    with StorageBytes() as memory:
        torch.autograd.backward(scored(on_meta, LENGTHS).sum())
    assert memory.largest < SQUARE
    assert len(calls) == 2

    def masked(*args: Any, **kwargs: Any) -> Tensor:
        return varlen_attn(*args, **kwargs) + torch.empty(len(args[0]), len(args[0])).sum()

    at_once(masked)
    with torch.no_grad(), StorageBytes() as memory:
        scored(on_meta, LENGTHS)
    assert memory.largest > SQUARE, "a mask would be seen"


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "is_taken"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 64, (8, 0), True),
        (torch.float32, 128, (9, 0), False),
        (torch.bfloat16, 128, (7, 5), False),
        (torch.bfloat16, 20, (9, 0), False),
        (torch.bfloat16, 512, (9, 0), False),
    ],
)
def test_the_kernel_is_chosen_by_what_it_takes(
    dtype: torch.dtype,
    size: int,
    capability: tuple[int, int],
    is_taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGpu:
        is_cuda, device, shape = True, torch.device("cuda:0"), (1, 4, 9, size)

    query: Any = OnGpu()
    query.dtype = dtype
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert takes_all_rows(query) == is_taken
    assert not takes_all_rows(torch.zeros(1, 4, 9, size, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_of_this_gpu_gives_the_numbers_of_rows_one_by_one(
    policy: CausalLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = policy.copy()
    on_gpu.network.to("cuda", torch.bfloat16)
    found = learn_rows(on_gpu, LENGTHS)
    monkeypatch.setattr(attention, "takes_all_rows", lambda query: False)
    expected = learn_rows(on_gpu, LENGTHS)
    torch.testing.assert_close(found[0], expected[0], atol=0.05, rtol=0.02)
    assert (found[1] - expected[1]).norm() < 0.05 * expected[1].norm()


def test_a_network_that_drops_the_packing_is_refused(policy: CausalLanguageModel) -> None:
    deaf: Any = policy.copy()
    deaf.network.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="would see each other"), torch.no_grad():
        scored(deaf, [9, 3, 3])


WIDTH = 16

META = torch.device("meta")


def learn_scores(
    num: int, vocab_size: int, at_once: int, device: torch.device, **given: Any
) -> Any:
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
        position = torch.arange(first, end)[:, None]
        return (torch.arange(50) > 25) & (position % 3 == 0)

    cpu = torch.device("cpu")
    whole = learn_scores(num, 50, 10_000, cpu, forbidden=forbidden)
    parts = learn_scores(num, 50, 4 * 50, cpu, forbidden=forbidden)
    for found, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def most_bytes(num: int, vocab_size: int, at_once: int) -> int:
    # on the meta device, where 8,192 positions of 152,000 tokens cost nothing
    with StorageBytes() as memory:
        learn_scores(num, vocab_size, at_once, META)
    return memory.most


def test_memory_does_not_grow_with_positions_times_vocabulary() -> None:
    logits = 4 * 8192 * 152_000
    grown = most_bytes(8192, 152_000, 1 << 26) - most_bytes(1024, 152_000, 1 << 26)
    assert grown < 0.01 * logits
    assert most_bytes(8192, 152_000, 1 << 40) > 4 * logits


LONG_SIZES = SIZES | {"max_position_embeddings": 512}

FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LONG_SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LONG_SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**LONG_SIZES, head_dim=16)
    ),
}

LONG, SHORT, OTHER, TINY = (
    np.arange(5, 45),
    np.arange(60, 90),
    np.arange(100, 120),
    np.arange(50, 53),
)

ROWS: list[tuple[np.ndarray, list[int]]] = [
    (LONG, [20, 21, 22]),
    (SHORT, [23, 24]),
    (LONG, [25]),
    (LONG, [20, 27, 28, 29, 30]),
    (OTHER, [31, 32]),
    (SHORT, [33, 34, 35, 36]),
]
"""Two prompts that several rows have, one of its own, and replies of one token and more."""

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


@pytest.fixture(params=sorted(FAMILIES))
def model(request: pytest.FixtureRequest) -> CausalLanguageModel:
    torch.manual_seed(0)
    known = tiny(SHAPE, ["one two"], seed=0)
    network: Any = FAMILIES[request.param]()
    return CausalLanguageModel(network, known._tokenizer, known.checkpoint_files())


def score(
    model: CausalLanguageModel,
    rows: Sequence[tuple[np.ndarray, list[int]]],
    grammars: dict[int, tuple[tuple[int, int, str], ...]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all reply tokens, end to end; row k is at temperature
    0.5 + k / 4.
    """
    tokens = torch.full((len(rows), max(len(reply) for _, reply in rows)), NO_TOKEN)
    for line, (_, reply) in zip(tokens, rows, strict=True):
        line[: len(reply)] = torch.tensor(reply)
    observations = [
        {"prompt_tokens": prompt, "grammars": (grammars or {}).get(number, ())}
        for number, (prompt, _) in enumerate(rows)
    ]
    temperatures = 0.5 + torch.arange(len(rows)) / 4
    log_probs, entropies = model.log_probs(model.prepare(observations), tokens, temperatures)
    return log_probs[tokens != NO_TOKEN], entropies[tokens != NO_TOKEN]


def learn(model: CausalLanguageModel, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and a gradient of all weights in which every token weighs
    differently.
    """
    model.network.zero_grad()
    log_probs, entropies = score(model, *args)
    weights = torch.linspace(-1.0, 2.0, len(log_probs))
    torch.autograd.backward((weights * log_probs - 0.1 * entropies).sum())
    grads = [each.grad.flatten() for each in model.network.parameters() if each.grad is not None]
    return log_probs.detach(), entropies.detach(), torch.cat(grads)


def widths_read(model: CausalLanguageModel) -> list[list[int]]:
    """Return a list that gets the shape of all tokens that the network reads from now on."""
    shapes: list[list[int]] = []
    model.network.base_model.register_forward_pre_hook(  # type: ignore[operator, union-attr]
        lambda module, args, kwargs: shapes.append(list(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    return shapes


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that turns sharing off."""
    return lambda: monkeypatch.setattr(policy_file, "share_prompts", lambda *args: None)


@pytest.mark.parametrize(
    "rows",
    [ROWS, [row for row in ROWS if row[0] is LONG], [*ROWS, *ROWS, (TINY, [37]), (TINY, [38])]],
    ids=["several prompts", "one prompt", "rows that would be packed"],
)
def test_shared_prompts_give_the_numbers_and_gradients_of_rows_of_their_own(
    model: CausalLanguageModel, rows: list[tuple[np.ndarray, list[int]]], alone: Any
) -> None:
    shapes = widths_read(model)
    found = learn(model, rows)
    widest = max(
        len(prompt) + sum(len(reply) - 1 for other, reply in rows if other is prompt)
        for prompt, _ in rows
    )
    assert shapes == [[len({id(prompt) for prompt, _ in rows}), widest]]
    alone()
    for actual, expected in zip(found, learn(model, rows), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-4)


def test_a_reply_does_not_see_the_others(model: CausalLanguageModel) -> None:
    first, _ = score(model, [(LONG, [20, 21]), (LONG, [22, 23, 24])])
    second, _ = score(model, [(LONG, [20, 21]), (LONG, [80, 81, 82])])
    torch.testing.assert_close(first[:2], second[:2], atol=1e-6, rtol=1e-5)
    assert (first[2:] - second[2:]).abs().max() > 1e-3


def test_replies_keep_the_grammars_that_they_were_sampled_under(
    model: CausalLanguageModel, alone: Any
) -> None:
    digits = model.tokenize("42").tolist()
    rows = [(LONG, [20, 21]), (LONG, [20, *digits]), (LONG, digits)]
    rule = "%llguidance {}\nstart: /[0-9]{1,2}/\n"
    grammars = {1: ((1, 1 + len(digits), rule),), 2: ((0, len(digits), rule),)}
    free, _, _ = learn(model, rows)
    found = learn(model, rows, grammars)
    assert (found[0] - free)[3:].min() > 0.1, "fewer tokens were possible"
    torch.testing.assert_close(found[0][:3], free[:3])
    alone()
    for actual, expected in zip(found, learn(model, rows, grammars), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-4)


def test_long_replies_to_a_short_prompt_are_rows_of_their_own() -> None:
    replies = [torch.zeros(600, dtype=torch.long)] * 8
    assert share_prompts([np.arange(20)] * 8, replies, 64) is None
    assert share_prompts([np.arange(600)] * 8, [reply[:20] for reply in replies], 64) is not None


def test_different_prompts_are_not_put_together() -> None:
    replies = [torch.tensor([7, 8])] * 2
    assert share_prompts([np.array([1, 0, 5]), np.array([1, 0, 6])], replies, 64) is None
    narrow = np.array([1, 0], np.int32)  # the same bytes as one wider number
    assert share_prompts([narrow, np.array([1])], replies, 64) is None
    assert share_prompts([narrow, np.array([1, 0])], replies, 64) is not None


def test_a_policy_that_reads_images_keeps_rows_of_their_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError

    model = load_language_model(write_tiny_vision(tmp_path / "tiny"))
    monkeypatch.setattr(policy_file, "share_prompts", refuse)
    batch = model.prepare([{"prompt_tokens": np.array([5, 6, 7, 8])}] * 2)
    log_probs, _ = model.log_probs(batch, torch.tensor([[20, 21]] * 2), torch.ones(2))
    torch.testing.assert_close(log_probs[0], log_probs[1])


async def test_an_update_on_conversations_of_two_turns_changes_the_same_weights(
    alone: Any,
) -> None:
    async def update() -> tuple[Tensor, float]:
        model = tiny(SHAPE, ["a"], seed=0)
        trajectories = [chat(model, number) for number in range(3)]
        shapes = widths_read(model)
        config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0))
        async with DeviceLane(num_threads=1) as lane:
            report = await Learner(model, lane, config).update(trajectories, [1.0, -0.5, 0.25])
        lines.append(shapes[0][0])
        assert report.metrics["update/log_prob_gap_max"] < 1e-4
        weights = torch.cat([each.detach().flatten() for each in model.network.parameters()])
        return weights, report.metrics["update/loss"]

    lines: list[int] = []
    shared, loss = await update()
    alone()
    expected, expected_loss = await update()
    assert lines == [1, 3]
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    torch.testing.assert_close(shared, expected, atol=2e-5, rtol=0.0)
