"""Only the action tokens' rows of the head are computed, in acting and in learning."""

import msgspec
import pytest
import torch
from storage_bytes import StorageBytes
from torch import Tensor

from vla_rl.models.example_inputs import example_row
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.types import Sampling


def batch_of(policy: OpenVlaOft) -> PrismaticBatch:
    row = example_row(policy)
    assert row is not None
    return row.batch


def peak_bytes(config: OpenVlaOftConfig, vocab_size: int) -> int:
    """Return the most bytes of an update and a decision, without the head, the table of embeddings,
    and their gradients."""
    llm = msgspec.structs.replace(config.llm, vocab_size=vocab_size)
    policy = OpenVlaOft.create(msgspec.structs.replace(config, llm=llm), seed=0)
    trunk = policy.network.language_model
    for table in (trunk.lm_head, trunk.get_input_embeddings()):
        table.requires_grad_(False)
    batch = batch_of(policy)
    tokens = torch.full((1, config.num_action_tokens), vocab_size - 1)
    with StorageBytes() as memory:
        torch.autograd.backward(policy.log_probs(batch, tokens, torch.ones(1))[0].sum())
        with torch.no_grad():
            policy.sample(batch, [Sampling(seed=0)])
    # a view of the head's rows shares the whole head's storage
    return memory.most - trunk.lm_head.weight.nbytes


def test_memory_does_not_grow_with_the_vocabulary(config: OpenVlaOftConfig) -> None:
    small, large = (peak_bytes(config, size) for size in (1024, 32_000))
    of_all_logits = 4 * config.num_action_tokens * (32_000 - 1024)
    assert abs(large - small) < 0.001 * of_all_logits


@pytest.mark.parametrize("rank", [None, 2])
def test_log_probs_and_gradients_are_those_of_the_whole_heads_action_rows(
    policy: OpenVlaOft, rank: int | None
) -> None:
    if rank is not None:
        policy = policy.adapted(LoraConfig(rank=rank), seed=0)
    network, batch = policy.network, batch_of(policy)
    tokens = torch.arange(768, 1024)[None, : policy.config.num_action_tokens]

    def whole() -> Tensor:
        logits = network.language_model.lm_head(network.read(batch))[..., 768:1024]
        return logits.float().log_softmax(-1).gather(-1, tokens[..., None] - 768)[..., 0]

    trained = [each for each in network.parameters() if each.requires_grad]
    expected, found = whole(), policy.log_probs(batch, tokens, torch.ones(1))[0]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    grads = [
        torch.autograd.grad(each.sum(), trained, allow_unused=True) for each in (found, expected)
    ]
    for ours, theirs in zip(*grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            # a float32 sum rounds by its largest terms, in another order on each CPU
            atol = 3e-6 * max(float(theirs.abs().max()), 1e-3)
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
