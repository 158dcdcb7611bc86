"""Rows with an equal prompt share it while learning, and have the numbers and gradients of rows that
are read one by one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_vision import write_tiny_vision
from torch import Tensor

from benchmarks.conversations import chat
from vla_rl.engines import DeviceLane
from vla_rl.engines.policy_model import NO_TOKEN
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.language import (
    CausalLanguageModel,
    TinyConfig,
    load_language_model,
    policy as policy_file,
    tiny,
)
from vla_rl.models.language.shared_prompts import share_prompts

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)),
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
def policy(request: pytest.FixtureRequest) -> CausalLanguageModel:
    torch.manual_seed(0)
    known = tiny(SHAPE, ["one two"], seed=0)
    network: Any = FAMILIES[request.param]()
    return CausalLanguageModel(network, known._tokenizer, known.checkpoint_files())


def score(
    policy: CausalLanguageModel,
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
    log_probs, entropies = policy.log_probs(policy.prepare(observations), tokens, temperatures)
    return log_probs[tokens != NO_TOKEN], entropies[tokens != NO_TOKEN]


def learn(policy: CausalLanguageModel, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies, and a gradient of all weights in which every token weighs
    differently.
    """
    policy.network.zero_grad()
    log_probs, entropies = score(policy, *args)
    weights = torch.linspace(-1.0, 2.0, len(log_probs))
    torch.autograd.backward((weights * log_probs - 0.1 * entropies).sum())
    grads = [each.grad.flatten() for each in policy.network.parameters() if each.grad is not None]
    return log_probs.detach(), entropies.detach(), torch.cat(grads)


def widths_read(policy: CausalLanguageModel) -> list[list[int]]:
    """Return a list that gets the shape of all tokens that the network reads from now on."""
    shapes: list[list[int]] = []
    policy.network.base_model.register_forward_pre_hook(  # type: ignore[operator, union-attr]
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
    policy: CausalLanguageModel, rows: list[tuple[np.ndarray, list[int]]], alone: Any
) -> None:
    shapes = widths_read(policy)
    found = learn(policy, rows)
    widest = max(
        len(prompt) + sum(len(reply) - 1 for other, reply in rows if other is prompt)
        for prompt, _ in rows
    )
    assert shapes == [[len({id(prompt) for prompt, _ in rows}), widest]]
    alone()
    for actual, expected in zip(found, learn(policy, rows), strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-4)


def test_a_reply_does_not_see_the_others(policy: CausalLanguageModel) -> None:
    first, _ = score(policy, [(LONG, [20, 21]), (LONG, [22, 23, 24])])
    second, _ = score(policy, [(LONG, [20, 21]), (LONG, [80, 81, 82])])
    torch.testing.assert_close(first[:2], second[:2], atol=1e-6, rtol=1e-5)
    assert (first[2:] - second[2:]).abs().max() > 1e-3


def test_replies_keep_the_grammars_that_they_were_sampled_under(
    policy: CausalLanguageModel, alone: Any
) -> None:
    digits = policy.tokenize("42").tolist()
    rows = [(LONG, [20, 21]), (LONG, [20, *digits]), (LONG, digits)]
    rule = "%llguidance {}\nstart: /[0-9]{1,2}/\n"
    grammars = {1: ((1, 1 + len(digits), rule),), 2: ((0, len(digits), rule),)}
    free, _, _ = learn(policy, rows)
    found = learn(policy, rows, grammars)
    assert (found[0] - free)[3:].min() > 0.1, "fewer tokens were possible"
    torch.testing.assert_close(found[0][:3], free[:3])
    alone()
    for actual, expected in zip(found, learn(policy, rows, grammars), strict=True):
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

    policy = load_language_model(write_tiny_vision(tmp_path / "tiny"))
    monkeypatch.setattr(policy_file, "share_prompts", refuse)
    batch = policy.prepare([{"prompt_tokens": np.array([5, 6, 7, 8])}] * 2)
    log_probs, _ = policy.log_probs(batch, torch.tensor([[20, 21]] * 2), torch.ones(2))
    torch.testing.assert_close(log_probs[0], log_probs[1])


async def test_an_update_on_conversations_of_two_turns_changes_the_same_weights(
    alone: Any,
) -> None:
    async def update() -> tuple[Tensor, float]:
        policy = tiny(SHAPE, ["a"], seed=0)
        trajectories = [chat(policy, number) for number in range(3)]
        shapes = widths_read(policy)
        config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0))
        async with DeviceLane(num_threads=1) as lane:
            report = await Learner(policy, lane, config).update(trajectories, [1.0, -0.5, 0.25])
        lines.append(shapes[0][0])
        assert report.metrics["update/log_prob_gap_max"] < 1e-4
        weights = torch.cat([each.detach().flatten() for each in policy.network.parameters()])
        return weights, report.metrics["update/loss"]

    lines: list[int] = []
    shared, loss = await update()
    alone()
    expected, expected_loss = await update()
    assert lines == [1, 3]
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    torch.testing.assert_close(shared, expected, atol=2e-5, rtol=0.0)
