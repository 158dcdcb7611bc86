"""The trained weights of each policy in a host's memory: versions on their way in, and the newest.

begin ─► put, put, ...        from the control process ─┐
    ├──► open doors, take     from the ranks            ├─► check ─► to be applied
    ├──► take                 from a neighbour          │
    └──► open                 from a process beside     ┘
give: to a neighbour, while they come in and until the next version begins
"""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import nn

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.direct_link import make_link_keys
from vla_rl.engines.vllm.staging import HostMemory
from vla_rl.engines.weight_shards import WeightShard
from vla_rl.remote_rollout.flat_weights import IncomingWeights, OpenedWeights, WeightHeading
from vla_rl.remote_rollout.peer_sockets import SocketAddress
from vla_rl.remote_rollout.weight_links import (
    ReceivedBytes,
    ShardReceiver,
    WeightReceiver,
    WeightSender,
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
        self._givers: dict[str, WeightSender] = {}
        self._takers: dict[str, ShardReceiver] = {}
        self._keys: dict[str, KeyPair] = {}

    def begin(self, heading: WeightHeading) -> None:
        """Make room for a version. Raises: CheckpointError if it is not of this policy."""
        # a thread may still write what came for a version that was given up
        is_written = heading.member in self._takers
        self._close_doors(heading.member)
        before = None if is_written else self._rows.get(heading.member)
        memory = None if before is None else before.memory
        network = self._networks[heading.member]
        self._rows[heading.member] = IncomingWeights(heading, network, memory)

    async def put(self, member: str, start: int, piece: np.ndarray) -> None:
        """Add the next piece. Raises: CheckpointError if it is not the next one."""
        row = self._rows[member]
        row.put(start, piece)
        self._give()
        await row.read_on()

    def open_doors(self, member: str, keys: Sequence[str]) -> list[SocketAddress]:
        """Let ranks with these keys give their shares. Raises: OSError if no port is free."""
        self._close_doors(member)
        taker = self._takers[member] = ShardReceiver(keys, self._rows[member], self._give)
        return taker.doors

    async def take_shares(self, member: str, shares: Sequence[WeightShard]) -> str:
        """Take the shares of the ranks: see `ShardReceiver.take`."""
        taker = self._takers[member]
        try:
            return await taker.take(shares)
        finally:
            if self._takers.get(member) is taker:
                self._close_doors(member)

    def new_link(self) -> str:
        """Make keys for taking from one neighbour; return the public one."""
        keys = make_link_keys()
        self._keys[keys.public] = keys
        return keys.public

    async def take(
        self, member: str, link_key: str, host: str, door: SocketAddress
    ) -> ReceivedBytes:
        """Take what is missing from a neighbour: see `WeightReceiver.take`."""
        taker = WeightReceiver(self._keys.pop(link_key), self._rows[member], self._give)
        return await taker.take(host, door)

    def num_received(self, member: str) -> int:
        """Return the number of bytes that have come of the version that was begun last."""
        return self._rows[member].num_received

    def give(self, link_key: str) -> SocketAddress:
        """Let the neighbour with this key take weights. Raises: OSError if no port is free."""
        giver = self._givers[link_key] = WeightSender(link_key, self._rows.get)
        return giver.door

    def end_giving(self, link_key: str) -> None:
        """Close the door to a neighbour, if it is open."""
        giver = self._givers.pop(link_key, None)
        if giver is not None:
            giver.close()

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
        """Close all doors."""
        for link_key in list(self._givers):
            self.end_giving(link_key)
        for member in list(self._takers):
            self._close_doors(member)

    def _close_doors(self, member: str) -> None:
        taker = self._takers.pop(member, None)
        if taker is not None:
            taker.close()

    def _give(self) -> None:
        for giver in self._givers.values():
            giver.give()
