"""Hosts that are lent are those of their owner, and a change is reported once."""

from collections.abc import AsyncIterator

from vla_rl.cluster.hosts import Host, HostChange, HostResources, Joined, Left
from vla_rl.cluster.lent import LentHosts


def host(name: str) -> Host:
    return Host(name=name, resources=HostResources(num_cores=1, memory_bytes=1))


class Owner:
    """Hosts whose changes were written down."""

    def __init__(self, there: tuple[Host, ...], *changes: HostChange) -> None:
        self._there, self._changes = there, changes
        self.is_open = True

    def hosts(self) -> tuple[Host, ...]:
        return self._there

    async def changes(self) -> AsyncIterator[HostChange]:
        for change in self._changes:
            yield change

    async def __aenter__(self) -> "Owner":
        raise AssertionError("its owner has entered it")

    async def __aexit__(self, *error: object) -> None:
        self.is_open = False


async def test_a_change_from_before_the_block_is_not_reported_again() -> None:
    a, b, c = host("a"), host("b"), host("c")
    # b joined before the block and c had left before it; then a leaves, and c comes back
    owner = Owner(
        (a, b),
        Joined(host=b),
        Left(host=c, cause="gone"),
        Left(host=a, cause="gone"),
        Joined(host=c),
        Left(host=c, cause="gone"),
    )
    async with LentHosts(owner) as lent:
        assert lent.hosts() == (a, b)
        seen = [(type(change).__name__, change.host.name) async for change in lent.changes()]
    assert seen == [("Left", "a"), ("Joined", "c"), ("Left", "c")]


async def test_leaving_the_block_leaves_the_hosts_to_their_owner() -> None:
    owner = Owner((host("a"),))
    async with LentHosts(owner):
        pass
    assert owner.is_open
