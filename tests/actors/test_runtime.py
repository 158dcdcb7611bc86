"""What `spawn` refuses, what mypy knows of a handle, and settings."""

import asyncio
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sample_actors import Counter

from vla_rl.actors import (
    Actor,
    ChildProcess,
    InLoop,
    RemoteHost,
    RestartPolicy,
    Runtime,
    actor_method,
    call_all,
    make_keys,
    read_keys,
    read_public_key,
)
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.handles import get_client
from vla_rl.actors.placement import Intensity
from vla_rl.actors.processes.channels import ActorExit, Channel
from vla_rl.actors.supervision import Launchers
from vla_rl.util.stalls import LoopLag

SUPPORT = Path(__file__).parent / "support"


async def test_a_class_inside_a_function_cannot_be_a_child() -> None:
    class Local(Actor):
        async def ping(self) -> None:
            """Answer."""

    async with asyncio.timeout(20), Runtime() as runtime:
        await (await runtime.spawn(Local)).ping()
        with pytest.raises(TypeError, match="is defined inside a function"):
            await runtime.spawn(Local, placement=ChildProcess())


async def test_an_endpoint_that_takes_anything_is_refused() -> None:
    class Loose(Actor):
        async def take(self, **settings: Any) -> None:
            """Take it."""

    async with asyncio.timeout(20), Runtime() as runtime:
        with pytest.raises(
            TypeError,
            match=r"Loose\.take takes \*settings; a method names each of its parameters",
        ):
            await runtime.spawn(Loose)


async def test_a_stream_must_say_what_it_yields() -> None:
    class Odd(Actor):
        async def numbers(self) -> int:  # type: ignore[misc]
            yield 1

    async with asyncio.timeout(20), Runtime() as runtime:
        with pytest.raises(
            TypeError,
            match=r"Odd\.numbers is an async generator annotated .*expected AsyncIterator",
        ):
            await runtime.spawn(Odd)


async def test_what_is_no_actor_class_is_refused() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        with pytest.raises(TypeError, match=r"derive it from vla_rl\.actors\.Actor"):
            await runtime.spawn(dict)  # type: ignore[type-var]


async def test_a_runtime_that_is_not_open_spawns_nothing() -> None:
    with pytest.raises(RuntimeError, match="is not open; use `async with`"):
        await Runtime().spawn(Counter)


async def test_an_actor_in_this_loop_may_be_given_anything_and_a_child_may_not() -> None:
    class Holder(Actor):
        def __init__(self, counter: Any) -> None:
            self._counter = counter

        async def total(self) -> int:
            total: int = await self._counter.total()
            return total

    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, 4, placement=ChildProcess())
        holder = await runtime.spawn(Holder, counter)
        assert await holder.total() == 4
        with pytest.raises(TypeError, match="cannot be sent"):
            await runtime.spawn(Counter, counter, placement=ChildProcess())  # type: ignore[arg-type]


async def test_a_runtime_forgets_actors_that_ended_and_their_handles_do_not() -> None:
    async with asyncio.timeout(20), Runtime() as runtime, Runtime(name="other") as other:
        counter = await runtime.spawn(Counter, name="old")
        await runtime.stop(counter)
        assert runtime.info(counter).state == "stopped"
        client = weakref.ref(get_client(counter))
        with pytest.raises(ValueError, match="actor 'old' belongs to another runtime than 'other'"):
            other.info(counter)
        del counter
        while client() is not None:  # whoever tidies up after the actor may still have to run
            await asyncio.sleep(0)
            gc.collect()


async def test_a_deadline_of_an_endpoint_replaces_that_of_its_actor() -> None:
    class Slow(Actor):
        @actor_method(deadline_s=30.0)
        async def reset(self) -> str:
            await asyncio.sleep(0.5)
            return "ready"

    async with asyncio.timeout(20), Runtime() as runtime:
        slow = await runtime.spawn(Slow, deadline_s=0.1)
        assert await slow.reset() == "ready"


async def test_a_deadline_given_with_the_actor_replaces_that_of_its_endpoint() -> None:
    class Slow(Actor):
        @actor_method(deadline_s=0.1)
        async def reset(self) -> str:
            await asyncio.sleep(0.5)
            return "ready"

    async with asyncio.timeout(20), Runtime() as runtime:
        slow = await runtime.spawn(Slow, deadlines_s={"reset": 30.0})
        assert await slow.reset() == "ready"
        for wrong in ({"restart": 1.0}, {"reset": 0.0}):
            with pytest.raises(ValueError, match=r"expected more than 0 s, for one of \['reset'\]"):
                await runtime.spawn(Slow, deadlines_s=wrong)


async def test_only_endpoints_can_be_fanned_out() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter)
        with pytest.raises(ValueError, match="no actors to call"):
            await call_all([], Counter.add, 1)
        with pytest.raises(TypeError, match="on_stop is not a method of Counter"):
            await call_all([counter], Counter.on_stop)
        with pytest.raises(TypeError, match="is not a handle; use what Runtime"):
            await call_all([Counter()], Counter.add, 1)


def test_an_intensity_counts_restarts_in_a_sliding_window() -> None:
    intensity = Intensity(RestartPolicy(max_restarts=2, within_s=10.0))
    assert [intensity.admit_restart(now) for now in (0.0, 1.0, 2.0, 10.5, 10.9, 11.1)] == [
        True,
        True,
        False,
        True,
        False,
        True,
    ]


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="shared_memory_mib is -1, expected >= 0"):
        ChildProcess(shared_memory_mib=-1)
    with pytest.raises(ValueError, match="max_restarts=-1"):
        RestartPolicy(max_restarts=-1)
    with pytest.raises(ValueError, match="deadline_s is 0, expected more than 0 seconds"):
        actor_method(deadline_s=0)
    with pytest.raises(ValueError, match=r"address is 'ipc:///tmp/x', expected tcp://host:port"):
        RemoteHost(address="ipc:///tmp/x", server_public_key="", client_keys=read_only_keys())


def read_only_keys() -> Any:
    from vla_rl.actors import KeyPair

    return KeyPair(public="p", secret="s")


def test_keys_are_secret_and_never_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, ("ann", "bob"))
    assert sorted(file.name for file in folder.iterdir()) == [
        *("ann.key", "ann.pub", "bob.key", "bob.pub", "server.key", "server.pub")
    ]
    assert (folder / "ann.key").stat().st_mode & 0o777 == 0o600
    pair = read_keys(folder / "ann.key")
    assert read_public_key(folder / "ann.pub") == pair.public
    assert pair.secret not in repr(pair)
    with pytest.raises(FileExistsError):
        make_keys(folder, ("bob",))
    with pytest.raises(ValueError, match="is not a key file"):
        read_keys(folder / "ann.pub")
    with pytest.raises(ValueError, match="expected a public key of 40"):
        read_public_key(folder / "ann.key")


TYPED = """
from sample_actors import Counter
from vla_rl.actors import ChildProcess, Runtime, call_all

async def use(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, 3, name="c", placement=ChildProcess())
    reveal_type(await counter.add(2))
    reveal_type(await call_all([counter], Counter.add, 2))
    await counter.add("two")
    await counter.subtract(1)
    await runtime.spawn(Counter, "three")
    await call_all([counter], Counter.add, "two")
"""


# Without what the root package imports for type checkers, torch and all, mypy needs 2 s and no cache.
MYPY = """
[mypy]
strict = True
[mypy-vla_rl,numpy.*,torch.*,zmq.*]
follow_imports = skip
"""


def test_mypy_knows_the_constructor_and_the_endpoints(tmp_path: Path) -> None:
    file, settings = tmp_path / "typed.py", tmp_path / "mypy.ini"
    file.write_text(TYPED)
    settings.write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    command += ["--config-file", str(settings), "--cache-dir", os.devnull]
    environment = {**os.environ, "MYPYPATH": str(SUPPORT)}
    printed = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=110, check=False
    ).stdout
    mine = [line.split(":", 2) for line in printed.splitlines() if line.startswith(str(file))]
    assert [int(line) for _, line, text in mine if " error:" in text] == [9, 10, 11, 12]
    by_line = {int(line): text for _, line, text in mine}
    assert 'Revealed type is "int"' in by_line[7].replace("builtins.", "")
    assert 'Revealed type is "list[int]"' in by_line[8].replace("builtins.", "")
    assert 'incompatible type "str"; expected "int"' in by_line[9]
    assert 'has no attribute "subtract"' in by_line[10]
    assert "incompatible type" in by_line[11]
    assert "incompatible type" in by_line[12]


async def test_items_of_another_type_than_declared_are_refused() -> None:
    class Liar(Actor):
        async def numbers(self) -> AsyncIterator[int]:
            yield "one"  # type: ignore[misc]

    async with asyncio.timeout(20), Runtime() as runtime:
        liar = await runtime.spawn(Liar)
        with pytest.raises(TypeError, match=r"Expected `int`, got `str`"):
            await anext(liar.numbers())
        assert runtime.info(liar).num_rejected == 0


@pytest.mark.parametrize("nothing", [0, -1.0, float("nan")])
async def test_times_of_nothing_are_refused_before_anything_starts(nothing: float) -> None:
    async with Runtime() as runtime:
        with pytest.raises(
            ValueError, match=rf"start_timeout_s is {nothing}, expected more than 0"
        ):
            await runtime.spawn(Counter, start_timeout_s=nothing)
        with pytest.raises(ValueError, match=rf"deadline_s is {nothing}, expected more than 0"):
            await runtime.spawn(Counter, deadline_s=nothing)
        with pytest.raises(
            ValueError, match=rf"deadline of add is {nothing} s, expected more than"
        ):
            await runtime.spawn(Counter, deadlines_s={"add": nothing})


@asynccontextmanager
async def open_launchers() -> AsyncIterator[Launchers]:
    lag = LoopLag()
    launchers = Launchers("test", lag)
    yield launchers
    await launchers.close_fork_servers()
    launchers.close()
    lag.stop_sampling()


@pytest_asyncio.fixture
async def launchers() -> AsyncIterator[Launchers]:
    async with open_launchers() as launchers:
        yield launchers


def launched(launchers: Launchers, placement: Any) -> tuple[Channel, "asyncio.Future[ActorExit]"]:
    """Open a channel to a counter, and give it with its death to come."""
    death: asyncio.Future[ActorExit] = asyncio.get_running_loop().create_future()
    launch = launchers.make_launcher(
        "counter", get_method_table(Counter), (3,), placement, mailbox=4
    )
    return launch(lambda frames: None, death.set_result), death


@pytest.fixture
def nowhere(tmp_path: Path) -> RemoteHost:
    """A host that does not answer."""
    make_keys(tmp_path)
    return RemoteHost(
        address="tcp://127.0.0.1:1",
        server_public_key=read_public_key(tmp_path / "server.pub"),
        client_keys=read_keys(tmp_path / "client.key"),
    )


async def test_an_actor_of_this_loop_has_no_process_and_each_incarnation_a_channel_of_its_own(
    launchers: Launchers,
) -> None:
    (first, death), (second, other) = (launched(launchers, InLoop()) for _ in range(2))
    assert first.pid == second.pid == 0
    first.kill_incarnation()
    async with asyncio.timeout(10):
        assert (await death).cause == "killed"
        assert not other.done()
        second.kill_incarnation()
        await other


async def test_actors_of_one_host_share_a_connection_until_its_settings_differ(
    launchers: Launchers, nowhere: RemoteHost
) -> None:
    slow = RemoteHost(
        address=nowhere.address,
        server_public_key=nowhere.server_public_key,
        client_keys=nowhere.client_keys,
        lost_after_s=30.0,
    )
    channels = [launched(launchers, host)[0] for host in (nowhere, nowhere, slow)]
    # a connection numbers its actors
    assert [channel.actor_id for channel in channels] == [1, 2, 1]


async def test_closing_the_connections_ends_the_actors_behind_them(
    nowhere: RemoteHost,
) -> None:
    async with open_launchers() as launchers:
        _, death = launched(launchers, nowhere)
    async with asyncio.timeout(10):
        assert (await death).cause == "connection to tcp://127.0.0.1:1 was closed"


async def test_a_placement_of_another_kind_is_refused_before_anything_starts(
    launchers: Launchers,
) -> None:
    with pytest.raises(TypeError, match="'here', expected InLoop, ChildProcess or RemoteHost"):
        launched(launchers, "here")


def test_actors_are_imported_without_torch() -> None:
    program = (
        "import sys, vla_rl.actors; sys.exit('torch' in sys.modules or 'gymnasium' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ})
