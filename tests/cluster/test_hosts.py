"""Hosts: this one alone, its GPUs, hosts that another part of the run has opened."""

import os
from collections.abc import AsyncIterator

import pytest

from vla_rl.cluster.hosts import (
    Gpu,
    Host,
    HostChange,
    HostResources,
    Joined,
    Left,
    OpenHosts,
    ThisHost,
    parse_visible_gpus,
)


async def test_by_default_there_is_this_host_and_it_never_changes() -> None:
    async with ThisHost() as hosts:
        (host,) = hosts.hosts()
        assert host.placement is None
        assert host.resources.num_cores == len(os.sched_getaffinity(0))
        assert host.resources.memory_bytes > 1 << 30
        assert [change async for change in hosts.changes()] == []


async def test_resources_that_are_given_are_those_of_this_host() -> None:
    resources = HostResources(num_cores=3, memory_bytes=5 << 30)
    async with ThisHost(resources) as hosts:
        assert hosts.hosts()[0].resources == resources


LISTED = """0, GPU-aaa, NVIDIA H200, 143771
1, GPU-bbb, NVIDIA H200, 143771
2, GPU-ccc, NVIDIA L4, 23034
3, GPU-ddd, NVIDIA GB10, [N/A]
"""


def test_a_gpu_has_a_name_its_memory_and_its_number() -> None:
    first, *_, last = parse_visible_gpus(LISTED, None)
    assert first == Gpu(name="NVIDIA H200", memory_bytes=143771 << 20, device="0")
    # the fourth does not report its memory
    assert (last.name, last.device) == ("NVIDIA L4", "2")


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2,0", ["2", "0"]), ("GPU-bb", ["1"]), ("1,9,2", ["1"]), ("", []), ("-1", [])],
)
def test_only_the_gpus_that_cuda_shows_are_used_in_its_order(
    visible: str, expected: list[str]
) -> None:
    assert [gpu.device for gpu in parse_visible_gpus(LISTED, visible)] == expected


def test_a_machine_without_gpus_has_none() -> None:
    assert parse_visible_gpus("", None) == ()


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
    async with OpenHosts(owner) as opened:
        assert opened.hosts() == (a, b)
        seen = [(type(change).__name__, change.host.name) async for change in opened.changes()]
    assert seen == [("Left", "a"), ("Joined", "c"), ("Left", "c")]


async def test_leaving_the_block_leaves_the_hosts_to_their_owner() -> None:
    owner = Owner((host("a"),))
    async with OpenHosts(owner):
        pass
    assert owner.is_open
