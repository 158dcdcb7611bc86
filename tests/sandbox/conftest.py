"""Puts the helper modules of these tests where they can be imported, by child processes too."""

from collections.abc import AsyncIterator

import pytest_asyncio

from vla_rl.sandbox import Sandbox


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """One for all tests of faults that a sandbox outlives, which is most of what it promises."""
    async with Sandbox() as sandbox:
        yield sandbox
