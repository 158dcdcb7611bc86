"""The trained weights of each policy in a host's memory: versions on their way in, and the newest.

begin ─► put, put, ...                  from the control process ─┐
    ├──► open_shard_sockets, receive    from the ranks            ├─► check ─► to be applied
    ├──► receive                        from a peer               │
    └──► open                           from another process here ┘
serve: to a peer, while they come in and until the next version begins
"""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from vla_rl.actors.remote.peer_sockets import SocketAddress
from vla_rl.engines.vllm.staging import HostMemory
from vla_rl.engines.weight_shards import WeightShard
from vla_rl.remote_rollout.flat_weights import IncomingWeights, OpenedWeights, WeightHeading
from vla_rl.remote_rollout.weight_links import (
    ReceivedBytes,
    ShardReceiver,
    WeightRows,
    receive_weights,
)


class WeightStore:
    """Weights of the policies of one process. Owned by one event loop.

    Args:
        networks: the networks that the weights are for, by member name.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self._networks = networks
        self._rows: dict[str, IncomingWeights] = {}
        self._opened: dict[str, OpenedWeights] = {}
        self._receivers: dict[str, ShardReceiver] = {}
        self._news = asyncio.Event()

    def begin(self, heading: WeightHeading) -> None:
        """Make room for a version. Raises: CheckpointError if it is not of this policy."""
        # a thread may still write what came for a version that was given up
        is_written = heading.member in self._receivers
        self._close_sockets(heading.member)
        before = None if is_written else self._rows.get(heading.member)
        memory = None if before is None else before.memory
        network = self._networks[heading.member]
        self._rows[heading.member] = IncomingWeights(heading, network, memory)
        self._note_bytes()

    async def put(self, member: str, start: int, piece: np.ndarray) -> None:
        """Add the next piece. Raises: CheckpointError if it is not the next one."""
        row = self._rows[member]
        row.put(start, piece)
        self._note_bytes()
        await row.read_on()

    def open_sockets(self, member: str, keys: Sequence[str]) -> list[SocketAddress]:
        """Let ranks with these keys give their shards. Raises: OSError if no port is free."""
        self._close_sockets(member)
        receiver = self._receivers[member] = ShardReceiver(
            keys, self._rows[member], self._note_bytes
        )
        return receiver.addresses

    async def receive_shards(self, member: str, shards: Sequence[WeightShard]) -> str:
        """Take the shards of the ranks: see `ShardReceiver.receive`."""
        receiver = self._receivers[member]
        try:
            return await receiver.receive(shards)
        finally:
            if self._receivers.get(member) is receiver:
                self._close_sockets(member)

    async def receive(self, member: str, rows: WeightRows) -> ReceivedBytes:
        """Take what is missing from a peer: see `receive_weights`."""
        return await receive_weights(rows, self._rows[member], self._note_bytes)

    def num_received(self, member: str) -> int:
        """Return the number of bytes that have come of the version that was begun last."""
        return self._rows[member].num_received

    def get_row(self, member: str) -> IncomingWeights | None:
        """Return the version of a policy that was begun last; None if it has none."""
        return self._rows.get(member)

    async def wait_for_bytes(self) -> None:
        """Wait until more bytes of any version have come, or a version was begun."""
        await self._news.wait()

    async def check(self, member: str, digest: str) -> None:
        """Compare what came with its digest. Raises: CheckpointError if they differ."""
        await self._rows[member].check(digest)

    def memory(self, member: str) -> HostMemory:
        """Return where other processes of this host find the bytes."""
        return self._rows[member].memory.shared()

    def open(self, heading: WeightHeading, memory: HostMemory, digest: str) -> None:
        """Open a version that a process beside has. Raises: CheckpointError."""
        network = self._networks[heading.member]
        self._opened[heading.member] = OpenedWeights(heading, network, memory, digest)

    def to_apply(self, member: str) -> IncomingWeights | OpenedWeights:
        """Return the version that was checked last; of one that was opened, nothing is kept."""
        opened = self._opened.pop(member, None)
        return self._rows[member] if opened is None else opened

    def close(self) -> None:
        """Close all sockets."""
        for member in list(self._receivers):
            self._close_sockets(member)

    def _close_sockets(self, member: str) -> None:
        receiver = self._receivers.pop(member, None)
        if receiver is not None:
            receiver.close()

    def _note_bytes(self) -> None:
        # each event wakes those that wait by now, and those that come later wait for the next one
        self._news.set()
        self._news = asyncio.Event()
