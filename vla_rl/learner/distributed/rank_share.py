"""One rank's share of the newest weights, for engines on other hosts.

A host may take it until the weights change, also while the next update is computed: a host that joins
meanwhile needs the version that the others act with.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from vla_rl.actors.direct_link import make_link_keys
from vla_rl.actors.placement import KeyPair
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.weight_shards import (
    ShardDigest,
    ShardPiece,
    ShardSocket,
    WeightShard,
    split_shard,
)
from vla_rl.errors import WeightsNotGiven
from vla_rl.learner.distributed.share_giver import ShareGiver
from vla_rl.learner.distributed.shared_training import SharedTraining

PIECE_BYTES: Final = 2 << 20
"""Bytes of one piece. A host passes a piece on once it has it from all ranks, so larger ones would
make each host of a chain later."""


class RankShare:
    """Describes and gives the share of one rank. Owned by one event loop.

    Args:
        rank: number of the rank.
        training: the policy.
        lane: reads it, between two pieces of other work.
    """

    def __init__(self, rank: int, training: SharedTraining, lane: DeviceLane) -> None:
        self._rank, self._training, self._lane = rank, training, lane
        self._begins: dict[str, int] = {}
        self._row_bytes = 0
        self._keys: dict[str, KeyPair] = {}

    def share(self, begins: dict[str, int], row_bytes: int) -> WeightShard:
        """Return what this rank holds, on the device lane; `give` sends the same later."""
        self._begins, self._row_bytes = begins, row_bytes
        digest = ShardDigest()
        for piece in self._pieces():
            digest.add(piece)
        return WeightShard(
            holder=self._rank,
            state=self._training.num_changes,
            num_bytes=digest.num_bytes,
            digest=digest.digest,
        )

    def new_link(self) -> str:
        """Make keys for one host; return the public one."""
        keys = make_link_keys()
        self._keys[keys.public] = keys
        return keys.public

    async def give(self, link_key: str, door: ShardSocket, state: int) -> None:
        """Send the share. Raises: as `ShareGiver.give`."""
        pieces = self._pieces()

        async def next_piece() -> ShardPiece | None:
            read = partial(self._next, pieces, state)
            is_current, piece = await self._lane.run(read, work="publish")
            if not is_current:
                raise WeightsNotGiven("the ranks have newer weights by now")
            return piece

        await ShareGiver(self._keys.pop(link_key), door, next_piece).give()

    def _pieces(self) -> Iterator[ShardPiece]:
        parts = self._training.parts(self._begins, PIECE_BYTES)
        return split_shard(parts, PIECE_BYTES, self._row_bytes)

    def _next(self, pieces: Iterator[ShardPiece], state: int) -> tuple[bool, ShardPiece | None]:
        """Return whether the weights are still those of the share, and the next piece if so."""
        # on the lane, where no step can come in between
        if self._training.num_changes != state:
            return False, None
        return True, next(pieces, None)
