"""What the runs of one file share."""

from collections.abc import AsyncIterator

import pytest_asyncio
from toy_runs import share_servers

from vla_rl.actors import LastingForkServers


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def servers() -> AsyncIterator[LastingForkServers]:
    """Servers from which all runs of a file fork their simulators: a new one imports for half a
    second. Tests that use them run in one loop: `toy_runs.SHARES_SERVERS`.
    """
    async with LastingForkServers("tests") as opened:
        share_servers(opened)
        yield opened
