"""Tests that start an engine are left out where vLLM is not installed."""

import gc
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from vla_rl.engines.vllm.adapter import installed_build

if TYPE_CHECKING:
    from acting_team import OneEngine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if installed_build() is None:
        skip = pytest.mark.skip(reason="vLLM is not installed; docs/engines.md says how")
        for item in items:
            if "needs_vllm" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _vllm_leaves_nothing_for_others() -> Iterator[None]:
    """vLLM leaves ZeroMQ contexts of its clients to the garbage collector, which complains of them:
    here, not elsewhere.
    """
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def one_engine() -> "AsyncIterator[OneEngine]":
    """An engine of a policy that acts, for test_contracts.py and then test_lifecycle.py."""
    from acting_team import OneEngine  # here: it brings torch and vLLM's modules

    async with AsyncExitStack() as stack:
        yield OneEngine(stack)
