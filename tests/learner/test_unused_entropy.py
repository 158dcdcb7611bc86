"""Entropies that nothing learns from are gone before the backward pass: their graph would keep the
logits of all chunks of a language model."""

import weakref
from typing import Any

import pytest
import torch
from storage_bytes import StorageBytes
from torch import Tensor, nn

from benchmarks.gpu.tiny_policies import demonstrated, observation, policy_on_host, trajectories
from vla_rl.engines import DeviceLane
from vla_rl.learner import ImitationConfig, Learner, LearnerConfig
from vla_rl.learner.imitation import Demonstration, Imitator
from vla_rl.models.language.rows import score_tokens

META = torch.device("meta")


def watched_policy(graphs: list[bool]) -> Any:
    """A policy that notes in its backward pass whether the graph of its entropies is still there."""
    policy = policy_on_host("mlp").copy()
    log_probs = policy.log_probs

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        found, entropies = log_probs(*args)
        entropy = weakref.ref(entropies)

        def note(gradient: Tensor) -> None:
            graphs.append(entropy() is not None)

        if found.requires_grad:
            found.register_hook(note)
        return found, entropies

    policy.log_probs = watched
    return policy


@pytest.mark.parametrize(("coef", "is_there"), [(0.0, False), (0.01, True)])
async def test_a_learner_keeps_the_graph_of_entropies_only_for_a_bonus(
    coef: float, is_there: bool
) -> None:
    graphs: list[bool] = []
    async with DeviceLane(num_threads=1) as lane:
        config = LearnerConfig(micro_batch=4, entropy_coef=coef, max_mismatch=100.0)
        await Learner(watched_policy(graphs), lane, config).update(
            trajectories("mlp"), [1.0, -1.0, 0.5]
        )
    assert graphs
    assert set(graphs) == {is_there}


async def test_imitation_keeps_no_graph_of_entropies() -> None:
    graphs: list[bool] = []
    shown = demonstrated("mlp")
    examples = [
        Demonstration(observation=observation("mlp", number), actions=shown, num_valid=len(shown))
        for number in range(3)
    ]
    async with DeviceLane(num_threads=1) as lane:
        await Imitator(watched_policy(graphs), lane, ImitationConfig(micro_batch=2)).update(
            examples
        )
    assert graphs
    assert not any(graphs)


def most_bytes(num: int, *, is_kept: bool) -> int:
    """Learn from log-probs of `num` positions of 152,000 tokens alone; return the peak."""
    head = nn.Linear(16, 152_000, bias=False, device=META)
    hidden = torch.randn(num, 16, device=META).requires_grad_()
    chosen = torch.zeros(num, dtype=torch.long, device=META)
    with StorageBytes() as memory:
        found, entropies = score_tokens(
            head, hidden, chosen, torch.ones(num, device=META), lambda *_: None, vocab_size=152_000
        )
        if not is_kept:
            entropies = entropies.detach()
        torch.autograd.backward(found.sum())
    return memory.most


def test_the_graph_of_entropies_would_keep_all_logits() -> None:
    logits = 4 * 8192 * 152_000
    kept, gone = most_bytes(8192, is_kept=True), most_bytes(8192, is_kept=False)
    assert kept > 2 * logits
    assert gone < 0.5 * logits
