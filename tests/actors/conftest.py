"""Runs these tests on uvloop, and lets them and their children import the sample actors."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop

import vla_rl

SUPPORT = Path(__file__).parent / "support"
sys.path.insert(0, str(SUPPORT))


@pytest.hookimpl
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], object]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def program_environment() -> dict[str, str]:
    """Environment of a program under test, which may import the sample actors, and runs the code
    that is tested here.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(SUPPORT), str(Path(vla_rl.__file__).parent.parent))),
    }
