"""Processes that stand still: those that are frozen are killed long before any deadline, and no
others are.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from durations import at_some_pace
from hooks import Heir
from processes import children_of, processes_of_session
from sample_actors import Counter

from vla_rl.actors import (
    ChildProcess,
    ForkServer,
    PrepareHook,
    RemoteHost,
    RestartPolicy,
    Runtime,
    make_keys,
    read_keys,
)
from vla_rl.actors.host import HostServer
from vla_rl.actors.processes import channels
from vla_rl.actors.processes.liveness import ProcessReader, ProcessState
from vla_rl.errors import ActorDied, ActorFrozen

PROGRAM = Path(__file__).parent / "support" / "programs.py"
FORKED = ChildProcess(fork_from=ForkServer(), frozen_after_s=1.0)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with asyncio.timeout(100), Runtime(name="test", stop_grace_s=2.0) as opened:
        yield opened


async def test_stopped_processes_fail_calls_that_have_no_deadline_however_they_were_started(
    runtime: Runtime, program_environment: dict[str, str]
) -> None:
    env = {"PYTHONPATH": program_environment["PYTHONPATH"]}
    other_placement = ChildProcess(python=sys.executable, env=env, frozen_after_s=1.0)
    placements = {
        "fresh": ChildProcess(frozen_after_s=1.0),
        "forked": FORKED,
        "elsewhere": other_placement,
    }
    calls = {}
    for name, placement in placements.items():
        counter = await runtime.spawn(Counter, name=name, placement=placement)
        calls[name] = (
            asyncio.create_task(counter.wait_for_gate("caller")),
            runtime.info(counter).pid,
        )
        # a concurrent method: its answer says that the call before it has arrived
        await counter.cancelled()
    for _, pid in calls.values():
        os.kill(pid, signal.SIGSTOP)
    for name, (call, pid) in calls.items():
        with pytest.raises(
            ActorFrozen, match=r"it was stopped by a signal for \d\.\d s, so it was killed"
        ) as raised:
            await call
        assert (raised.value.name, raised.value.pid) == (name, pid)


async def test_a_process_that_is_stopped_while_idle_is_replaced(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, 5, placement=FORKED, restart=RestartPolicy())
    stopped = runtime.info(counter).pid
    os.kill(stopped, signal.SIGSTOP)
    while runtime.info(counter).num_restarts < 1:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    assert await counter.total() == 5
    assert runtime.info(counter).pid != stopped


async def test_a_process_whose_native_code_waits_for_ever_with_the_interpreter_held_is_killed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_SILENT_TIMES", 2.0)
    heir = await runtime.spawn(Heir, placement=FORKED)
    with pytest.raises(
        ActorFrozen, match=r"it gave no sign of life for \d\.\d s and used no CPU time"
    ):
        await heir.hold_the_interpreter()


async def test_a_process_that_works_with_the_interpreter_held_is_left_alone(
    runtime: Runtime,
) -> None:
    heir = await runtime.spawn(Heir, placement=FORKED)
    eye = ProcessReader(runtime.info(heir).pid)
    computing = asyncio.create_task(heir.compute_with_the_interpreter_held(0.5))  # CPU seconds
    seen = [eye.read_state()]
    while not computing.done():
        await asyncio.sleep(0.1)
        seen.append(eye.read_state())
    assert await computing > 0
    assert seen.count(ProcessState.ASLEEP) <= 2  # before the call has arrived, and after its answer


async def test_a_process_with_frozen_after_s_of_none_is_not_observed(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, placement=ChildProcess(frozen_after_s=None))
    pid = runtime.info(counter).pid
    eye = ProcessReader(pid)
    os.kill(pid, signal.SIGSTOP)
    while eye.read_state() is not ProcessState.STOPPED:  # noqa: ASYNC110
        await asyncio.sleep(0)
    observed = await runtime.spawn(Counter, placement=FORKED)
    os.kill(runtime.info(observed).pid, signal.SIGSTOP)
    with pytest.raises(ActorFrozen):  # by then the observer has looked often enough
        await observed.total()
    os.kill(pid, signal.SIGCONT)
    assert await counter.pid() == pid


async def test_a_frozen_process_on_another_host_is_killed_there_and_called_frozen_here(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    opened = HostServer("tcp://127.0.0.1:0", server, [client.public], lost_after_s=60.0)
    async with asyncio.timeout(100), opened as host, Runtime() as runtime:
        there = RemoteHost(
            address=host.address,
            server_public_key=server.public,
            client_keys=client,
            lost_after_s=60.0,
        )
        counter = await runtime.spawn(Counter, name="far away", placement=there)
        os.kill(await counter.pid(), signal.SIGSTOP)
        with pytest.raises(ActorFrozen, match=r"'far away'.*it was stopped by a signal"):
            await counter.total()


# ---- fork servers


async def test_a_stopped_fork_server_is_killed_and_the_next_spawn_starts_another(
    runtime: Runtime,
) -> None:
    heir = await runtime.spawn(Heir, placement=FORKED)
    server = await heir.parent()
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(
        ActorDied, match=r"not forked: fork server of test died: it was stopped by a signal for \d"
    ):
        await runtime.spawn(Heir, placement=FORKED)
    successor = await runtime.spawn(Heir, placement=FORKED)
    assert await successor.parent() not in (server, await heir.parent())


async def test_a_fork_server_that_is_stopped_while_it_prepares_is_killed(runtime: Runtime) -> None:
    hook = PrepareHook("hooks:stop_itself")
    placement = ChildProcess(fork_from=ForkServer(prepare=(hook,)), frozen_after_s=1.0)
    with pytest.raises(
        ActorDied,
        match=r"it was stopped by a signal for .* during hooks:stop_itself, so it was kill",
    ):
        await runtime.prepare(placement)


async def test_a_fork_server_that_waits_in_a_hook_is_left_alone(runtime: Runtime) -> None:
    # asleep for longer than a fork may take
    hook = PrepareHook("hooks:take_time", {"seconds": 2.0})
    placement = ChildProcess(fork_from=ForkServer(prepare=(hook,)), frozen_after_s=1.0)
    await runtime.prepare(placement)


# ---- all at once, and one alone


class Program:
    """The program under test: its pid, its actors' pids, and rounds of calls."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.pid, *self.actors = [int(word) for word in self._stdout.readline().split()]

    def begin_calls(self, takes_s: float = 0.0) -> None:
        """Call every actor; returns when the calls are on their way."""
        print(takes_s, file=self._stdin, flush=True)
        assert self._stdout.readline() == "calling\n"

    def answers(self) -> list[str]:
        """How they ended."""
        return self._stdout.readline().split()

    def stand_still(self, seconds: float) -> None:
        """Stop all of its processes, as Ctrl-Z does, and continue them later, as fg does."""
        stopped = list(processes_of_session(self.pid))
        os.killpg(self.pid, signal.SIGSTOP)
        until_stopped(stopped)
        time.sleep(seconds)
        os.killpg(self.pid, signal.SIGCONT)


@contextmanager
def running_program(environment: dict[str, str], *arguments: str) -> Iterator[Program]:
    command = [sys.executable, str(PROGRAM), "waiting", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        yield Program(process)
        process.kill()


def until_stopped(pids: list[int]) -> None:
    for eye in map(ProcessReader, pids):
        while eye.read_state() is not ProcessState.STOPPED:
            time.sleep(0.01)


async def test_a_program_that_stands_still_as_a_whole_loses_no_process_and_no_call(
    program_environment: dict[str, str],
) -> None:
    async def stand_still_in_a_call(scale: float) -> None:
        # the deadline of each call
        with running_program(program_environment, str(2.0 * scale)) as program:
            program.begin_calls(1.5 * scale)
            # more than twice as long as one of its processes alone would have
            program.stand_still(2.5 * scale)
            assert program.answers() == [str(pid) for pid in program.actors]

    await at_some_pace(stand_still_in_a_call)


def test_one_process_that_stands_still_is_the_only_one_that_is_killed(
    program_environment: dict[str, str],
) -> None:
    with running_program(program_environment) as program:
        one, other, third = map(str, program.actors)
        fork_server = next(iter(children_of(program.pid) - set(program.actors)))
        os.kill(int(other), signal.SIGSTOP)
        program.begin_calls()
        assert program.answers() == [one, "ActorFrozen", third]
        os.kill(program.pid, signal.SIGSTOP)  # the observer alone: its children go on
        until_stopped([program.pid])
        time.sleep(1.5)
        os.kill(program.pid, signal.SIGCONT)
        program.begin_calls()
        assert program.answers() == [one, "ActorFrozen", third]
        assert fork_server in children_of(program.pid)
