"""The shares of all ranks, as engines on other hosts take them: see `ShardHolders`."""

import asyncio
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from vla_rl.engines.weight_shards import ShardSocket, WeightShard
from vla_rl.errors import ActorDied
from vla_rl.learner.distributed.group import RankGroup


class RankShares:
    """`ShardHolders` over the ranks of a sharded learner.

    A rank that dies ends all ranks, also while it gives its share; a host that dies ends none.

    Args: `group`, the ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group, self.turn = group, group.turn

    async def shares(self, begins: Mapping[str, int], row_bytes: int) -> list[WeightShard]:
        """Return what each rank holds. Raises: RankFailed."""
        found = await self._group.together(
            rank.share(dict(begins), row_bytes) for rank in self._group.ranks
        )
        seats = self._group.seating.seats
        return [replace(share, host=seats[share.holder].host) for share in found if share.num_bytes]

    async def new_links(self, shares: Sequence[WeightShard]) -> list[str]:
        """Return the ranks' public keys. Raises: RankFailed."""
        ranks = self._group.ranks
        return await self._group.each(ranks[share.holder].new_link() for share in shares)

    async def give(
        self, shares: Sequence[WeightShard], links: Sequence[str], doors: Sequence[ShardSocket]
    ) -> None:
        """Send each share to its door. Raises: WeightsNotGiven, RankFailed."""
        giving = [
            asyncio.ensure_future(self._group.ranks[share.holder].give(link, door, share.state))
            for share, link, door in zip(shares, links, doors, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(giving, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for each in done if (error := each.exception()) is not None]
        finally:
            # the doors of one host are of use together only
            for each in giving:
                each.cancel()
            await asyncio.gather(*giving, return_exceptions=True)
        for error in errors:
            if isinstance(error, ActorDied):
                await self._group.fail(error)
        for error in errors:
            raise error
