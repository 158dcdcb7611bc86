"""Hosts that are open already, for a part of a run that opens hosts by itself.

The learner's ranks are on hosts before episodes run, so the run opens the hosts first and lends them.
"""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from vla_rl.cluster.hosts import Host, HostChange, Hosts, Joined


class LentHosts:
    """Open hosts of another owner. Entering and leaving the block does not touch them.

    Args:
        hosts: their owner's, whose block is open. Nothing else may read its changes.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._there: set[str] = set()

    async def __aenter__(self) -> Self:
        """Take the hosts that are there now; `changes` goes on from them."""
        self._there = {host.name for host in self.hosts()}
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: their owner leaves them."""

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are there now, the control process's own first."""
        return self._hosts.hosts()

    async def changes(self) -> AsyncIterator[HostChange]:
        """Yield each host that joins or leaves after the block was entered."""
        async for change in self._hosts.changes():
            name = change.host.name
            # a change from before the block, which `hosts` showed already
            if (name in self._there) == isinstance(change, Joined):
                continue
            self._there ^= {name}
            yield change
