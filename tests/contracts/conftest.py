"""Places where the actors of a contract run, with one runtime for all tests of a file."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from sample_actors import (
    Counter,
)

from vla_rl.actors import (
    ChildProcess,
    ForkServer,
    InLoop,
    Placement,
    RemoteHost,
    Runtime,
    make_keys,
    read_keys,
    read_public_key,
)

SUPPORT = Path(__file__).parents[1] / "actors" / "support"

FORKED = ChildProcess(fork_from=ForkServer(imports=("sample_actors",)))


@pytest.fixture(scope="module")
def remote_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteHost]:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "keys")
    keys = folder / "keys"
    command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", "tcp://127.0.0.1:0"]
    command += [
        "--keys",
        str(keys / "server.key"),
        "--allow",
        str(keys / "client.pub"),
        "--lost-after",
        "30",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        yield RemoteHost(
            address=address,
            server_public_key=read_public_key(keys / "server.pub"),
            client_keys=read_keys(keys / "client.key"),
            lost_after_s=30.0,
            # most tests start several; tests/actors/test_lost_host.py has actors that are not forked
            process=FORKED,
        )
        server.terminate()
        assert server.wait(timeout=20) == 0


OF_SPAWNED_PROCESSES = {
    "test_a_call_runs_on_the_state_that_the_constructor_made",
    "test_arrays_travel_in_any_nesting",
    "test_a_builtin_error_arrives_as_its_class_with_the_remote_traceback",
    "test_a_frozen_actor_is_replaced_within_its_policy",
    "test_a_stream_gives_every_item_in_order",
    "test_a_constructor_that_raises_raises_in_spawn",
    "test_an_actor_that_does_not_start_in_time_is_given_up",
    "test_a_stopped_actor_finishes_its_calls_and_runs_on_stop",
    "test_an_on_stop_that_raises_is_an_error_in_the_log_and_the_actor_ends_all_the_same",
    "test_a_killed_actor_fails_its_calls_and_does_not_run_on_stop",
    "test_an_actor_that_keeps_dying_ends_the_runtime",
}
"""Tests of the suite with processes that are spawned: one of each kind of message, and all beginnings
and ends. Each process is a new interpreter; once it runs, it does what a forked one does."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "placement" in metafunc.fixturenames:
        marks = () if metafunc.function.__name__ in OF_SPAWNED_PROCESSES else pytest.mark.proof
        spawned = pytest.param("child_process", marks=marks)
        hosts = ["in_loop", spawned, "fork_server", "remote_host"]
        metafunc.parametrize("placement", hosts, indirect=True)


@pytest.fixture
def placement(request: pytest.FixtureRequest) -> Placement:
    if request.param == "in_loop":
        return InLoop()
    if request.param == "child_process":
        return ChildProcess()
    if request.param == "fork_server":
        return FORKED
    host: RemoteHost = request.getfixturevalue("remote_host")
    return host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime(remote_host: RemoteHost) -> AsyncIterator[Runtime]:
    """One for all tests: its fork server imports the actors once, and `remote_host` outlives it."""
    async with Runtime(name="contract", stop_grace_s=30.0) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(shared_runtime: Runtime) -> AsyncIterator[Runtime]:
    yield shared_runtime
    await shared_runtime._stop_all()


@pytest_asyncio.fixture(loop_scope="module")
async def counter(runtime: Runtime, placement: Placement) -> Counter:
    return await runtime.spawn(Counter, 3, name="counter", placement=placement)
