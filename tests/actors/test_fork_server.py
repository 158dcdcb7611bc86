"""Children that are forked from a clean process: what they share, what is their own, and what
happens when things die.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hooks import Heir
from processes import all_end, children_of, named_memory_of, those_left
from sample_actors import Counter, CrashLoop

from vla_rl.actors import (
    ChildProcess,
    ForkServer,
    LastingForkServers,
    PrepareHook,
    RestartPolicy,
    Runtime,
)
from vla_rl.actors.processes import fork_servers
from vla_rl.errors import ActorDied, ActorFrozen

PROGRAM = [sys.executable, str(Path(__file__).parent / "support" / "programs.py"), "forking"]
REMEMBER = PrepareHook("hooks:remember", {"word": "hello", "megabytes": 64})


def forked(*hooks: PrepareHook, env: dict[str, str] | None = None, **server: float) -> ChildProcess:
    return ChildProcess(env=env or {}, fork_from=ForkServer(prepare=hooks, **server))  # type: ignore[arg-type]


_there_before: set[int] = set()


@pytest.fixture(autouse=True)
def _servers_of_other_files() -> None:
    _there_before.clear()
    _there_before.update(all_servers())


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with asyncio.timeout(100), Runtime(name="test", stop_grace_s=2.0) as opened:
        yield opened


# ---- what is shared and what is not


async def test_children_share_what_a_hook_left_and_the_hook_runs_once(runtime: Runtime) -> None:
    heirs = [await runtime.spawn(Heir, placement=forked(REMEMBER)) for _ in range(3)]
    servers = {await heir.parent() for heir in heirs}
    assert len(servers) == 1
    assert {await heir.made_by() for heir in heirs} == servers
    assert [await heir.word() for heir in heirs] == ["hello"] * 3
    assert len({runtime.info(heir).pid for heir in heirs}) == 3


async def test_what_is_shared_costs_a_child_no_memory_of_its_own(runtime: Runtime) -> None:
    heir = await runtime.spawn(Heir, placement=forked(REMEMBER))
    assert await heir.num_shared_bytes() == 64 * 2**20
    assert await heir.private_mb() < 32


async def test_lasting_servers_serve_the_next_runtime_and_end_after_it() -> None:
    parents: list[int] = []
    async with asyncio.timeout(100), LastingForkServers("test") as servers:
        for _ in range(2):
            async with Runtime(fork_servers=servers) as runtime:
                heir = await runtime.spawn(Heir, placement=forked(REMEMBER))
                parents.append(await heir.parent())
    assert parents[0] == parents[1]
    with pytest.raises(ProcessLookupError):
        os.kill(parents[0], 0)
    async with Runtime("late", fork_servers=servers) as runtime:
        with pytest.raises(ActorDied, match="its runtime or its servers were closed"):
            await runtime.spawn(Counter, placement=forked())


async def test_another_preparation_gets_another_server(runtime: Runtime) -> None:
    one = await runtime.spawn(
        Heir, placement=forked(PrepareHook("hooks:remember", {"word": "one"}))
    )
    two = await runtime.spawn(
        Heir, placement=forked(PrepareHook("hooks:remember", {"word": "two"}))
    )
    assert (await one.word(), await two.word()) == ("one", "two")
    assert await one.parent() != await two.parent()


async def test_children_draw_different_random_numbers(runtime: Runtime) -> None:
    server = ForkServer(imports=("numpy.random",))  # its state is what children would share
    one, two = [
        await runtime.spawn(Heir, placement=ChildProcess(fork_from=server)) for _ in range(2)
    ]
    assert all(
        a != b for a, b in zip(await one.random_numbers(), await two.random_numbers(), strict=True)
    )


async def test_each_child_has_its_own_environment_on_top_of_its_servers(runtime: Runtime) -> None:
    server = ForkServer(env={"SERVED": "yes", "DEVICE": "none"})
    one, two = [
        await runtime.spawn(Heir, placement=ChildProcess(env={"DEVICE": device}, fork_from=server))
        for device in ("0", "1")
    ]
    assert await one.parent() == await two.parent()
    assert [await one.environment("DEVICE"), await two.environment("DEVICE")] == ["0", "1"]
    assert await two.environment("SERVED") == "yes"


async def test_a_child_holds_no_descriptor_of_its_siblings_or_of_its_server(
    runtime: Runtime,
) -> None:
    counts = []
    for _ in range(3):
        heir = await runtime.spawn(Heir, placement=forked())
        counts.append(await heir.open_files())
    assert counts[0] == counts[1] == counts[2]


async def test_a_child_starts_as_its_class_says_or_raises_what_its_constructor_raises(
    runtime: Runtime,
) -> None:
    with pytest.raises(ValueError, match="start is -1, expected >= 0"):
        await runtime.spawn(Counter, -1, placement=forked())
    assert await (await runtime.spawn(Counter, 5, placement=forked())).total() == 5


# ---- preparations that go wrong


async def test_what_a_hook_raises_is_raised_by_spawn_and_the_next_spawn_tries_again(
    runtime: Runtime,
) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"scene\.xml is missing") as raised:
            await runtime.spawn(Heir, placement=forked(PrepareHook("hooks:fail")))
        assert "in fail" in raised.value.__notes__[0]


async def test_what_a_failing_hook_printed_is_not_lost(
    runtime: Runtime, capfd: pytest.CaptureFixture[str]
) -> None:
    server = ForkServer(
        prepare=(PrepareHook("hooks:print_and_fail"),), env={"PYTHONUNBUFFERED": ""}
    )
    with pytest.raises(FileNotFoundError):
        await runtime.spawn(Heir, placement=ChildProcess(fork_from=server))
    assert capfd.readouterr().out == "looked in /usr/share/scenes\n"


async def test_leaving_the_runtime_while_an_interpreter_is_checked_starts_no_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checking, go_on = asyncio.Event(), asyncio.Event()

    async def check(_: str) -> None:
        checking.set()
        await go_on.wait()

    monkeypatch.setattr(fork_servers, "check_interpreter", check)
    placement = ChildProcess(python=sys.executable, fork_from=ForkServer())
    async with asyncio.timeout(20):
        async with Runtime() as left:
            tasks = [
                asyncio.create_task(left.prepare(placement)),
                asyncio.create_task(left.spawn(Heir, placement=placement)),
            ]
            await checking.wait()
            await asyncio.sleep(0)
        go_on.set()
        for task in tasks:
            with pytest.raises(
                ActorDied, match="not started, since its runtime or its servers were closed"
            ):
                await task
    assert servers_of_this_process() == []


async def test_a_hook_that_hangs_is_named_and_its_server_is_killed(runtime: Runtime) -> None:
    for limit_s in (4, 16, 30):  # on a busy machine its start may take longer than the limit
        with pytest.raises(
            ActorFrozen, match=rf"'fork server of test'.* did not end within {limit_s} s"
        ) as caught:
            await runtime.spawn(
                Heir, placement=forked(PrepareHook("hooks:hang"), prepare_timeout_s=limit_s)
            )
        assert servers_of_this_process() == []
        if "hooks:hang did not end" in str(caught.value):
            return
    pytest.fail(f"it was not named: {caught.value}")


async def test_a_hook_that_starts_a_thread_is_refused_with_the_name_of_the_thread(
    runtime: Runtime,
) -> None:
    with pytest.raises(
        RuntimeError, match=r"hooks:start_thread left 1 threads running.*\(prefetcher\)"
    ):
        await runtime.spawn(Heir, placement=forked(PrepareHook("hooks:start_thread")))


async def test_a_server_whose_hook_left_a_thread_that_does_not_end_is_gone_all_the_same(
    runtime: Runtime,
) -> None:
    with pytest.raises(RuntimeError, match="writer"):
        await runtime.spawn(Heir, placement=forked(PrepareHook("hooks:start_lasting_thread")))
    while servers_of_this_process():  # noqa: ASYNC110  the runtime is still open
        await asyncio.sleep(0.02)


async def test_what_a_server_takes_to_prepare_does_not_count_as_the_start_of_a_restarted_child(
    runtime: Runtime,
) -> None:
    placement = forked(PrepareHook("hooks:take_time", {"seconds": 4.0}))
    policy = RestartPolicy(max_restarts=1, within_s=60.0)
    heir = await runtime.spawn(Heir, placement=placement, restart=policy, start_timeout_s=3.9)
    server = await heir.parent()
    os.kill(server, signal.SIGKILL)
    while server in children_of(os.getpid()):  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    os.kill(runtime.info(heir).pid, signal.SIGKILL)
    while runtime.info(heir).num_restarts < 1:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert await heir.parent() not in (server, os.getpid())


async def test_a_server_that_dies_while_it_prepares_says_so_with_its_last_words(
    runtime: Runtime,
) -> None:
    with pytest.raises(ActorDied, match="exit code 5") as raised:
        await runtime.spawn(Heir, placement=forked(PrepareHook("hooks:exit_with", {"code": 5})))
    assert raised.value.stderr_tail == ("out of memory",)


@pytest.mark.parametrize(
    "rubbish",
    ["no reply", '{"type":"Forked","number":7,"pid":1}', '{"type":"Refused","number":0}'],
)
async def test_a_server_that_sends_something_else_than_its_replies_is_killed_and_replaced(
    runtime: Runtime, rubbish: str
) -> None:
    with pytest.raises(ActorDied, match="its reply cannot be read"):
        await runtime.spawn(
            Heir, placement=forked(PrepareHook("hooks:send_rubbish", {"content": rubbish}))
        )
    heir = await runtime.spawn(Heir, placement=forked(REMEMBER))
    assert await heir.word() == "hello"


@pytest.mark.parametrize(
    ("value", "words"),
    [("x" * 400_000, "Message too long"), ("caf\udce9", "surrogates not allowed")],
)
async def test_variables_that_no_message_holds_end_their_spawn_and_hold_up_no_other(
    runtime: Runtime, value: str, words: str
) -> None:
    heir = await runtime.spawn(Heir, placement=forked(REMEMBER))
    with pytest.raises(ActorDied, match=f"not forked: .*{words}"):
        await runtime.spawn(Heir, placement=forked(REMEMBER, env={"VALUE": value}))
    other = await runtime.spawn(Heir, placement=forked(REMEMBER))
    assert await other.parent() == await heir.parent()


async def test_an_end_of_a_child_that_nobody_has_is_ignored(runtime: Runtime) -> None:
    ended = PrepareHook(
        "hooks:send_rubbish", {"content": '{"type":"Ended","number":9,"returncode":0}'}
    )
    heir = await runtime.spawn(Heir, placement=forked(ended, REMEMBER))
    assert await heir.word() == "hello"


async def test_a_hook_that_does_not_exist_is_named(runtime: Runtime) -> None:
    with pytest.raises(AttributeError, match="no_such_hook"):
        await runtime.spawn(Heir, placement=forked(PrepareHook("hooks:no_such_hook")))


@pytest.mark.parametrize("nothing", [0, -1.0, float("nan")])
def test_a_prepare_timeout_of_nothing_is_refused(nothing: float) -> None:
    with pytest.raises(ValueError, match=rf"prepare_timeout_s is {nothing}, expected > 0 seconds"):
        ForkServer(prepare_timeout_s=nothing)


# ---- deaths


async def test_a_killed_child_fails_its_calls_at_once_with_its_signal(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, name="env-3", placement=forked())
    call = asyncio.create_task(counter.wait_for_gate("caller"))
    await counter.cancelled()
    pid = runtime.info(counter).pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied) as raised:
        await call
    assert (raised.value.name, raised.value.pid, raised.value.cause) == ("env-3", pid, "SIGKILL")


async def test_a_child_that_exits_says_its_code_and_its_last_words(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, placement=forked())
    with pytest.raises(ActorDied, match="exit code 3") as raised:
        await counter.say_and_exit("EGL: no device\nno way to draw", 3)
    assert raised.value.stderr_tail[-2:] == ("EGL: no device", "no way to draw")


async def test_a_frozen_child_is_killed_and_replaced_by_another_fork(runtime: Runtime) -> None:
    counter = await runtime.spawn(
        Counter, 5, placement=forked(), deadlines_s={"add": 0.3}, restart=RestartPolicy()
    )
    frozen = runtime.info(counter).pid
    os.kill(frozen, signal.SIGSTOP)
    with pytest.raises(ActorFrozen):
        await counter.add(1)
    assert await counter.total() == 5
    assert runtime.info(counter).pid != frozen
    with pytest.raises(ProcessLookupError):
        os.kill(frozen, 0)


async def test_children_survive_their_server_and_the_next_spawn_starts_another(
    runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    heir = await runtime.spawn(Heir, placement=forked(REMEMBER))
    server = await heir.parent()
    fd = os.pidfd_open(server)
    with caplog.at_level(logging.WARNING):
        os.kill(server, signal.SIGKILL)
        assert all_end([fd], within_s=10)
        heir_2 = await runtime.spawn(Heir, placement=forked(REMEMBER))
    assert await heir.word() == "hello"
    assert await heir_2.parent() not in (server, await heir.parent())
    assert "fork server of test died: SIGKILL; its 1 children continue" in caplog.text
    os.kill(runtime.info(heir).pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match="unknown, since its fork server is gone"):
        await heir.word()


async def test_an_orphan_of_its_server_still_stops_in_order(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, placement=forked())
    fd = os.pidfd_open(runtime.info(counter).pid)
    (server,) = servers_of_this_process()
    os.kill(server, signal.SIGKILL)
    await runtime.stop(counter)
    assert all_end([fd], within_s=0)


async def test_a_restart_after_the_death_of_the_server_uses_another_server(
    runtime: Runtime,
) -> None:
    actor = await runtime.spawn(CrashLoop, placement=forked(), restart=RestartPolicy())
    (server,) = servers_of_this_process()
    fd = os.pidfd_open(server)
    os.kill(server, signal.SIGKILL)
    assert all_end([fd], within_s=10)
    first = await actor.pid()
    with pytest.raises(ActorDied):
        await actor.exit()
    assert await actor.pid() != first


async def test_a_stopped_server_is_killed_and_does_not_delay_the_news_of_a_death(
    runtime: Runtime,
) -> None:
    counter = await runtime.spawn(Counter, placement=forked())
    (server,) = servers_of_this_process()
    os.kill(server, signal.SIGSTOP)
    os.kill(runtime.info(counter).pid, signal.SIGKILL)
    async with asyncio.timeout(8):  # less than a server has that runs
        with pytest.raises(ActorDied, match="unknown, since its fork server is gone"):
            await counter.total()
    assert await (await runtime.spawn(Counter, 4, placement=forked())).total() == 4


async def test_a_cancelled_spawn_leaves_no_child(runtime: Runtime) -> None:
    await runtime.prepare(forked())
    (server,) = servers_of_this_process()
    for num_turns in range(5):
        spawning = asyncio.create_task(runtime.spawn(Counter, placement=forked()))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        spawning.cancel()
        await asyncio.wait([spawning])
        assert spawning.cancelled()
        while children_of(server):  # noqa: ASYNC110  it reaps them in its own time
            await asyncio.sleep(0.01)


async def test_leaving_the_runtime_leaves_neither_server_nor_child() -> None:
    async with asyncio.timeout(30):
        async with Runtime() as runtime:
            counters = [await runtime.spawn(Counter, placement=forked()) for _ in range(2)]
            pids = [runtime.info(counter).pid for counter in counters] + servers_of_this_process()
            assert len(pids) == 3
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_kill_9_of_the_parent_leaves_no_server_no_child_no_socket_and_no_shared_memory(
    program_environment: dict[str, str],
) -> None:
    with subprocess.Popen(
        PROGRAM, stdout=subprocess.PIPE, text=True, env=program_environment
    ) as program:
        assert program.stdout is not None
        pids = [int(word) for word in program.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in pids]
        assert len(pidfds) == 3
        memory = named_memory_of([program.pid, *pids])
        program.kill()
        program.wait()
        assert all_end(pidfds, within_s=20)
        assert f"vla_rl-{program.pid}-" not in Path("/proc/net/unix").read_text()
        assert those_left(memory) == []


def servers_of_this_process() -> list[int]:
    """Fork servers among our children that began in this test; other files keep theirs open."""
    return [pid for pid in all_servers() if pid not in _there_before]


def all_servers() -> list[int]:
    """Fork servers among our children."""
    found = []
    for pid in children_of(os.getpid()):
        if b"vla_rl.actors.processes.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
            found.append(pid)
    return found
