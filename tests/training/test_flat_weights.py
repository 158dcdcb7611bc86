"""Weights on their way to a host arrive byte for byte, or not at all."""

import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.errors import CheckpointError
from vla_rl.training.hosts.flat_weights import FlatWeights, IncomingWeights, flattened


def network(seed: int, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width), nn.Linear(width, 2))
    made[0].to(torch.bfloat16)
    made[2].bias.requires_grad_(False)
    return made


def sent(weights: FlatWeights, to: nn.Module, size: int = 7) -> IncomingWeights:
    incoming = IncomingWeights(weights.heading, to)
    for start, piece in weights.pieces(size):
        incoming.put(start, piece)
    return incoming


def test_trained_weights_of_all_types_arrive_and_frozen_ones_stay() -> None:
    learner, far = network(0), network(1)
    frozen = far[2].bias.clone()
    incoming = sent(flattened(learner, 4), far)
    incoming.check()
    incoming.apply()
    for name, parameter in far.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, learner.get_parameter(name)), name
    assert torch.equal(far[2].bias, frozen)
    assert incoming.heading.version == 4


def test_nothing_acts_before_all_bytes_were_compared() -> None:
    incoming = sent(flattened(network(0), 1), network(1))
    with pytest.raises(AssertionError, match="unchecked"):
        incoming.apply()


def test_a_changed_byte_and_a_missing_piece_are_refused() -> None:
    weights = flattened(network(0), 1)
    incoming = IncomingWeights(weights.heading, network(1))
    with pytest.raises(CheckpointError, match=r"expected byte 0 of"):
        incoming.put(5, np.zeros(3, np.uint8))
    with pytest.raises(CheckpointError, match="arrived with 0 of"):
        incoming.check()
    heading = weights.heading
    weights.data[3] ^= 1
    changed = IncomingWeights(heading, network(1))
    for start, piece in weights.pieces():
        changed.put(start, piece)
    with pytest.raises(CheckpointError, match="other bytes than were sent"):
        changed.check()


def test_weights_of_another_policy_are_refused() -> None:
    heading = flattened(network(0), 1).heading
    with pytest.raises(
        CheckpointError, match=r"'0\.weight' of weights 1 is torch\.bfloat16 \[3, 5\], and torch"
    ):
        IncomingWeights(heading, network(0, width=40))
    with pytest.raises(CheckpointError, match=r"'0\.weight', which the policy on this host lacks"):
        IncomingWeights(heading, nn.Linear(2, 2))
