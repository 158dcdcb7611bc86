"""Weights as one row of bytes, and on their way from the ranks into a host's memory."""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.direct_link import make_link_keys
from vla_rl.actors.remote.peer_sockets import SocketAddress
from vla_rl.engines.weight_shards import (
    RowPart,
    ShardDigest,
    ShardPiece,
    ShardSocket,
    WeightShard,
    split_shard,
)
from vla_rl.errors import CheckpointError, HostNotReached, WeightsNotGiven
from vla_rl.learner.distributed.shared_training import ShardSender
from vla_rl.remote_rollout import weight_links
from vla_rl.remote_rollout.flat_weights import (
    FlatWeights,
    IncomingWeights,
    OpenedWeights,
    flatten_weights,
    weights_digest,
)
from vla_rl.remote_rollout.weight_links import ShardReceiver


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
    learner, remote_policy = network(0), network(1)
    frozen = remote_policy[2].bias.clone()
    weights = flatten_weights(learner, 4)
    incoming = sent(weights, remote_policy)
    await incoming.check(weights.digest)
    incoming.write_to_network()
    for name, parameter in remote_policy.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, learner.get_parameter(name)), name
    assert torch.equal(remote_policy[2].bias, frozen)
    assert incoming.heading.version == 4


def test_nothing_acts_before_all_bytes_were_compared() -> None:
    incoming = sent(flatten_weights(network(0), 1), network(1))
    with pytest.raises(AssertionError, match="unchecked"):
        incoming.write_to_network()


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
    remote_policy, learner = network(1), network(0)
    first = sent(flatten_weights(learner, 1), remote_policy)
    learner[0].weight.data.add_(1.0)
    newer = flatten_weights(learner, 2)
    second = IncomingWeights(newer.heading, remote_policy, first.memory)
    assert second.memory is first.memory
    assert second.num_received == 0
    for start, piece in newer.pieces():
        second.put(start, piece)
    await second.check(newer.digest)
    second.write_to_network()
    assert torch.equal(remote_policy[0].weight, learner[0].weight)


async def test_another_process_of_the_host_reads_the_same_memory() -> None:
    learner, unrelated = network(0), network(2)
    weights = flatten_weights(learner, 3)
    incoming = sent(weights, network(1))
    await incoming.check(weights.digest)
    memory = incoming.memory.shared()
    OpenedWeights(weights.heading, unrelated, memory, weights.digest).write_to_network()
    assert torch.equal(unrelated[0].weight, learner[0].weight)
    gone = msgspec.structs.replace(memory, path="/proc/1/fd/1000000")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        OpenedWeights(weights.heading, unrelated, gone, weights.digest)


def test_weights_of_another_policy_are_refused() -> None:
    heading = flatten_weights(network(0), 1).heading
    with pytest.raises(
        CheckpointError, match=r"'0\.weight' of weights 1 is torch\.bfloat16 \[3, 5\], and torch"
    ):
        IncomingWeights(heading, network(0, width=40))
    with pytest.raises(CheckpointError, match=r"'0\.weight', which the policy on this host lacks"):
        IncomingWeights(heading, nn.Linear(2, 2))


def shared_network(seed: int) -> nn.Module:
    """Weights of 8 rows and 6 numbers, and 8 numbers of 2 bytes, behind which 16 are the next."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(3))
    made[0].bias.data = made[0].bias.data.to(torch.bfloat16)
    return made


ROW, BIAS, NORM = 24, 192, 208
"""Bytes of a row of the weight, and the places of what comes behind it."""


def columns(weights: FlatWeights, first: int, last: int) -> list[RowPart]:
    """Columns of the weight, as a rank has them that shards each layer with another one."""
    run = 4 * (last - first)
    table = weights.data[:BIAS].reshape(8, ROW)[:, 4 * first : 4 * last]
    return [(4 * first, run, ROW, np.ascontiguousarray(table).reshape(-1))]


def rest(weights: FlatWeights) -> list[RowPart]:
    ends = ((BIAS, 16), (NORM, 12), (NORM + 16, 12))
    return [(at, size, size, weights.data[at : at + size]) for at, size in ends]


def pieces_of(parts: Sequence[RowPart], weights: FlatWeights) -> list[ShardPiece]:
    return list(split_shard(parts, 64, len(weights.data)))


def share_of(rank: int, pieces: Sequence[ShardPiece]) -> WeightShard:
    digest = ShardDigest()
    for piece in pieces:
        digest.add_piece(piece)
    return WeightShard(holder=rank, state=0, num_bytes=digest.num_bytes, digest=digest.digest)


async def given(keys: KeyPair, socket: SocketAddress, pieces: Sequence[ShardPiece]) -> None:
    left = iter(pieces)

    async def next_piece() -> ShardPiece | None:
        return next(left, None)

    at = ShardSocket(address=f"tcp://127.0.0.1:{socket.port}", public_key=socket.public_key)
    await ShardSender(keys, at, next_piece).send_pieces()


async def taken(
    incoming: IncomingWeights,
    shards: Sequence[WeightShard],
    pieces: Sequence[Sequence[ShardPiece]],
) -> tuple[str, list[int]]:
    """Let all ranks give; return the digest, and how far the row was whole meanwhile."""
    keys, materialised = [make_link_keys() for _ in shards], list[int]()
    receiver = ShardReceiver(
        [each.public for each in keys], incoming, lambda: materialised.append(incoming.num_received)
    )
    sending = [
        asyncio.create_task(given(link, socket, each))
        for link, socket, each in zip(keys, receiver.addresses, pieces, strict=True)
    ]
    try:
        async with asyncio.timeout(20):
            return await receiver.receive(shards), materialised
    finally:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


async def test_rows_columns_and_single_numbers_meet_at_their_places() -> None:
    weights, remote_policy = flatten_weights(shared_network(0), 1), shared_network(1)
    pieces = [
        pieces_of([*columns(weights, 0, 2), *rest(weights)], weights),
        pieces_of(columns(weights, 2, 6), weights),
    ]
    incoming = IncomingWeights(weights.heading, remote_policy)
    digest, materialised = await taken(
        incoming, [share_of(*each) for each in enumerate(pieces)], pieces
    )
    incoming.write_to_network()
    assert (
        digest
        == weights.digest
        == weights_digest(shared_network(0))
        == weights_digest(remote_policy)
    )
    assert materialised == sorted(materialised)
    assert materialised[-1] == len(weights.data)


async def test_bytes_that_a_rank_does_not_have_and_missing_ones_are_refused() -> None:
    weights = flatten_weights(shared_network(0), 1)
    pieces = pieces_of([*columns(weights, 0, 6), *rest(weights)], weights)
    changed = flatten_weights(shared_network(2), 1)
    other = pieces_of([*columns(changed, 0, 6), *rest(changed)], changed)
    with pytest.raises(CheckpointError, match="or other bytes than it has"):
        await taken(
            IncomingWeights(weights.heading, shared_network(1)), [share_of(0, pieces)], [other]
        )
    half = pieces_of(columns(weights, 0, 6), weights)
    with pytest.raises(CheckpointError, match=r"192 bytes .* in shards, expected 232"):
        await taken(
            IncomingWeights(weights.heading, shared_network(1)), [share_of(0, half)], [half]
        )


@pytest.mark.parametrize(
    ("at", "run", "distance"), [(-4, 8, 8), (236, 8, 8), (0, 0, 8), (0, 4, 2), (0, 8, 1 << 40)]
)
def test_a_place_outside_of_the_row_is_refused(at: int, run: int, distance: int) -> None:
    weights = flatten_weights(shared_network(0), 1)
    part = (at, run, distance, np.zeros(16 if at == 0 else 8, np.uint8))
    (piece,) = pieces_of([part], weights)
    with pytest.raises(CheckpointError, match="do not fit in 240 bytes"):
        IncomingWeights(weights.heading, shared_network(1)).write_piece(piece)


async def test_a_rank_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_links, "SILENT_S", 0.2)
    incoming = IncomingWeights(flatten_weights(shared_network(0), 1).heading, shared_network(1))
    receiver = ShardReceiver([make_link_keys().public], incoming, lambda: None)
    with pytest.raises(WeightsNotGiven, match=r"rank 7 was silent for 0\.2 s"):
        await receiver.receive([share_of(7, [])])


async def test_a_piece_that_leads_back_is_refused() -> None:
    weights = flatten_weights(shared_network(0), 1)
    pieces = pieces_of([*columns(weights, 0, 6), *rest(weights)], weights)
    incoming = IncomingWeights(weights.heading, shared_network(1))
    with pytest.raises(WeightsNotGiven, match="a piece of rank 0 leads back to byte 192"):
        await taken(incoming, [share_of(0, pieces)], [[pieces[0], pieces[0]]])


async def test_a_key_that_the_host_was_not_given_opens_no_connection() -> None:
    weights = flatten_weights(shared_network(0), 1)
    pieces = pieces_of([*columns(weights, 0, 6), *rest(weights)], weights)
    incoming = IncomingWeights(weights.heading, shared_network(1))
    async with asyncio.timeout(30):
        receiver = ShardReceiver([make_link_keys().public], incoming, lambda: None)
        with pytest.raises(HostNotReached, match=r"refuses the connection|does not answer"):
            await given(make_link_keys(), receiver.addresses[0], pieces)
        receiver.close()
    assert incoming.num_received == 0
