"""The learner's side of a publication: what it gives, as a version with an origin.

one process learns    adopt ─► a copy ────────────┐
ranks learn           take_shares ─► their shares ┴► `HostWeights.publish`
"""

import asyncio
from collections.abc import Awaitable, Callable

from torch import nn

from vla_rl.engines.weight_shares import ShareHolders
from vla_rl.remote_rollout.flat_weights import digest_of, flattened, heading_of, row_of
from vla_rl.remote_rollout.origins import HeldByRanks, HeldHere, Origin


class MemberWeights:
    """A `WeightSink` for one policy, whose weights act on other hosts.

    Args:
        name: member name of the policy.
        adopt: begins to apply a version on every host. Blocks: it is called on the device lane.
        publish: does the same in the loop.
    """

    def __init__(
        self,
        name: str,
        adopt: Callable[[Origin], None],
        publish: Callable[[Origin], Awaitable[None]],
    ) -> None:
        self._name, self._adopt, self._publish = name, adopt, publish
        self._nothing = nn.Module()

    @property
    def network(self) -> nn.Module:
        """None: the weights that act are on other hosts, and never the learner's own."""
        return self._nothing

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Begin to apply weights and their version on every host. Call it on the device lane."""
        self._adopt(HeldHere(flattened(network, weight_version, self._name)))

    async def take_shares(
        self, holders: ShareHolders, network: nn.Module, weight_version: int, *, is_current: bool
    ) -> None:
        """Begin to apply a version on every host, and return once the ranks have given it.

        See `ShareSink`.
        """
        begins, row_bytes = row_of(network)
        shares = await holders.shares(begins, row_bytes)
        heading = heading_of(network, weight_version, self._name)
        digest = await asyncio.to_thread(digest_of, network) if is_current else None
        await self._publish(HeldByRanks(heading, holders, shares, digest))
