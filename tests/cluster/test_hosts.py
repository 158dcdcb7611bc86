"""The hosts of a run."""

import os

from vla_rl.cluster import HostResources, ThisHost


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
