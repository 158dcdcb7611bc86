"""Tests that start an engine are left out where vLLM is not installed."""

import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.engines.vllm.adapter import installed_build

sys.path.insert(0, str(Path(__file__).parent / "support"))


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
