"""The fixtures that tests of engines and of learners share."""

from collections.abc import AsyncIterator

import pytest_asyncio
from engine_fixtures import lane, make_observation, policy, run_policy

from vla_rl.actors import LastingForkServers, Runtime

__all__ = ["lane", "make_observation", "policy", "run_policy"]


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def runtime(lasting_servers: LastingForkServers) -> AsyncIterator[Runtime]:
    """One runtime for all ranks of this folder, so that they are forked from servers that have
    imported torch and the policy once.
    """
    async with Runtime(fork_servers=lasting_servers) as runtime:
        yield runtime
