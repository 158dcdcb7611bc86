"""The way of a version of the weights to each host, so that it enters every machine once. Pure.

control process ─► gpu2:0 ─► gpu3:0 ─► gpu4:0        a chain: each cable carries one copy in, one out
                     ├ gpu2:1  reads the memory of gpu2:0
                     └ gpu2:2
"""

from collections.abc import Collection, Sequence

import msgspec


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The way of a version of the weights to one process."""

    host: str
    """Its name: `gpu2`, or `gpu2:3` for one of several on a machine."""

    source: str | None = None
    """Name of the process that has the bytes, or gets them meanwhile; None: the control process."""

    opens_memory: bool = False
    """Whether the source is on the same machine, so that its memory can be read in place."""


def deliveries(
    wanting: Sequence[str],
    having: Sequence[str] = (),
    unreachable: Collection[tuple[str, str]] = (),
) -> tuple[Delivery, ...]:
    """Return a delivery for each host that wants a version, each after that of its source.

    Args:
        wanting: hosts that lack the version.
        having: hosts that have all of its bytes in memory.
        unreachable: pairs (taker, giver) of machines that cannot connect.
    """
    readers: dict[str, str] = {machine_of(name): name for name in having}
    # the newest link of the chain; a machine that has the bytes already may begin one
    tail = having[-1] if having else None
    chain: list[Delivery] = []
    followers: list[Delivery] = []
    for name in wanting:
        machine = machine_of(name)
        if machine in readers:
            followers.append(Delivery(host=name, source=readers[machine], opens_memory=True))
            continue
        can_take = tail is not None and (machine, machine_of(tail)) not in unreachable
        chain.append(Delivery(host=name, source=tail if can_take else None))
        readers[machine] = tail = name
    return (*chain, *followers)


def machine_of(name: str) -> str:
    """Return the machine of an engine's process: `gpu2` for `gpu2:3`."""
    return name.partition(":")[0]
