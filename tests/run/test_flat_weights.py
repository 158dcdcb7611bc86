"""Weights on their way to a host arrive byte for byte, or not at all."""

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.errors import CheckpointError
from vla_rl.remote_rollout.flat_weights import (
    FlatWeights,
    IncomingWeights,
    OpenedWeights,
    flatten_weights,
)


def network(seed: int, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 2))
    made[0].to(torch.bfloat16)
    made[2].bias.requires_grad_(False)
    return made


def sent(weights: FlatWeights, to: nn.Module, size: int = 7) -> IncomingWeights:
    incoming = IncomingWeights(weights.heading, to)
    for start, piece in weights.pieces(size=size):
        incoming.put(start, piece)
    return incoming


async def test_trained_weights_of_all_types_arrive_and_frozen_ones_stay() -> None:
    learner, far = network(0), network(1)
    frozen = far[2].bias.clone()
    weights = flatten_weights(learner, 4)
    incoming = sent(weights, far)
    await incoming.check(weights.digest)
    incoming.apply()
    for name, parameter in far.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, learner.get_parameter(name)), name
    assert torch.equal(far[2].bias, frozen)
    assert incoming.heading.version == 4


def test_nothing_acts_before_all_bytes_were_compared() -> None:
    incoming = sent(flatten_weights(network(0), 1), network(1))
    with pytest.raises(AssertionError, match="unchecked"):
        incoming.apply()


async def test_a_changed_byte_and_a_missing_piece_are_refused() -> None:
    weights = flatten_weights(network(0), 1)
    digest = weights.digest
    incoming = IncomingWeights(weights.heading, network(1))
    with pytest.raises(CheckpointError, match=r"expected byte 0 of"):
        incoming.put(5, np.zeros(3, np.uint8))
    with pytest.raises(CheckpointError, match="arrived with 0 of"):
        await incoming.check(digest)
    weights.data[3] ^= 1
    changed = sent(weights, network(1))
    with pytest.raises(CheckpointError, match="other bytes than were sent"):
        await changed.check(digest)


async def test_the_next_version_takes_the_memory_of_the_last_one() -> None:
    far, learner = network(1), network(0)
    first = sent(flatten_weights(learner, 1), far)
    learner[0].weight.data.add_(1.0)
    newer = flatten_weights(learner, 2)
    second = IncomingWeights(newer.heading, far, first.memory)
    assert second.memory is first.memory
    assert second.num_received == 0
    for start, piece in newer.pieces():
        second.put(start, piece)
    await second.check(newer.digest)
    second.apply()
    assert torch.equal(far[0].weight, learner[0].weight)


async def test_another_process_of_the_host_reads_the_same_memory() -> None:
    learner, beside = network(0), network(2)
    weights = flatten_weights(learner, 3)
    incoming = sent(weights, network(1))
    await incoming.check(weights.digest)
    memory = incoming.memory.shared()
    OpenedWeights(weights.heading, beside, memory, weights.digest).apply()
    assert torch.equal(beside[0].weight, learner[0].weight)
    elsewhere = msgspec.structs.replace(memory, path="/proc/1/fd/1000000")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        OpenedWeights(weights.heading, beside, elsewhere, weights.digest)


def test_weights_of_another_policy_are_refused() -> None:
    heading = flatten_weights(network(0), 1).heading
    with pytest.raises(
        CheckpointError, match=r"'0\.weight' of weights 1 is torch\.bfloat16 \[3, 5\], and torch"
    ):
        IncomingWeights(heading, network(0, width=40))
    with pytest.raises(CheckpointError, match=r"'0\.weight', which the policy on this host lacks"):
        IncomingWeights(heading, nn.Linear(2, 2))
