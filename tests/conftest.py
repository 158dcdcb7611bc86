"""What every test shares: threads that leave the other cores alone, the event loop that the product
runs on, and chance that falls the same way in every run, however slow
(`--hypothesis-profile default` looks for new examples)."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import uvloop
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# First of all: timm imports torchvision, whose operators this declares.
import vla_rl  # noqa: F401

if TYPE_CHECKING:
    from vla_rl.actors import LastingForkServers

# Modules that several files of a room share. Child processes get this path too, so that an environment or an
# actor of a test is found there.
sys.path[:0] = map(str, sorted(Path(__file__).parent.rglob("support")))

# Hundreds of child processes import our modules; each would compile them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# Scenes of LIBERO's own meshes take three times as long to build; tests that are about those ask
# for `real_assets`.
os.environ.setdefault("VLA_RL_LIBERO_ASSETS", "stand-ins")
os.environ.setdefault("VLA_RL_ASSETS_ANNOUNCED", "1")

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


LONGEST = (
    "tests/engines/vllm",
    "tests/run/test_ranks.py",
    "tests/learner/distributed/test_sharded.py",
    "tests/envs/libero/test_stepping.py",
    "tests/run/test_held_out_run.py",
    "tests/sandbox/test_sandbox.py",
    "tests/run",
    "tests/remote_rollout",
    "tests/contracts",
    "tests/envs/libero",
    "tests/cli/doctor",
    "tests/recipes/test_eval_libero.py",
    "tests/learner",
    "tests/sandbox",
    "tests/cli/test_launch.py",
    "tests/recipes",
    "tests/scoring",
    "tests/pipelines",
    "tests/env_workers",
)
"""Files and folders that take longest, in the order in which `make test` begins them: a worker that
began with one of them last would end alone."""

RANKS = (
    "tests/learner/distributed/",
    "tests/remote_rollout/test_rank_weights.py",
    "tests/remote_rollout/test_image_routes.py",
)

TOGETHER = (
    ("tests/engines/vllm",),
    RANKS,
    ("tests/envs/libero",),
    ("tests/envs/metaworld",),
)
"""Beginnings of the paths of files that one worker runs, because each process pays for what they share:
8 s of CPU time for importing vLLM, 3 s for a server that ranks are forked from, and as long for
importing a simulator, reading its compiled code and building the scenes that fixtures keep."""


assert all(
    list(Path(__file__).parents[1].glob(f"{prefix}*")) for prefix in (*LONGEST, *chain(*TOGETHER))
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _turn_of(item.nodeid))
    if os.geteuid() != 0:
        skip = pytest.mark.skip(reason="needs root: `pytest -m needs_root` as root runs it")
        for item in items:
            if "needs_root" in item.keywords:
                item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return FolderScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


class FolderScheduling(LoadFileScheduling):
    """One worker for each file, and one for all files of a place of `TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        prefixes = next((prefixes for prefixes in TOGETHER if nodeid.startswith(prefixes)), None)
        return prefixes[0] if prefixes else super()._split_scope(nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage: what they import are millions of objects that live to
    the end, and visiting them again and again takes a quarter of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _turn_of(nodeid: str) -> int:
    turns = (turn for turn, prefix in enumerate(LONGEST) if nodeid.startswith(prefix))
    return next(turns, len(LONGEST))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lasting_servers() -> AsyncIterator["LastingForkServers"]:
    """Servers from which the files of `RANKS` fork their ranks: a new one imports for 4 s. Tests that
    use them run in one loop: `pytest.mark.asyncio(loop_scope="session")`.
    """
    from vla_rl.actors import LastingForkServers

    async with LastingForkServers("tests") as opened:
        yield opened


@pytest.fixture
def import_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported, and are forgotten after the test: another may use the
    same names.
    """
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(scope="session")
def real_assets() -> str:
    """The folder of LIBERO's own assets.

    A test that asks for it is skipped on a machine that has the placeholder assets alone.
    """
    # here: most tests need no simulator's imports
    from vla_rl.envs.libero.assets import (
        ASSETS_VARIABLE,
        PLACEHOLDER_ASSETS,
        find_assets,
        get_wheels_command,
    )

    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get(ASSETS_VARIABLE) == PLACEHOLDER_ASSETS:
            patch.delenv(ASSETS_VARIABLE)
        found = find_assets()
    if found.source == PLACEHOLDER_ASSETS:
        pytest.skip(f"LIBERO's own assets are not installed: {get_wheels_command()}")
    return str(found.path)
