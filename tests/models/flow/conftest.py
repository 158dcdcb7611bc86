"""A device lane for the tests of flow policies."""

from collections.abc import AsyncIterator

import pytest_asyncio

from vla_rl.engines import DeviceLane


@pytest_asyncio.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane
