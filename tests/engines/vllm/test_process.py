"""The processes of an engine: their end is seen at once, they die once with one cause, what was asked of them goes to
another."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from vla_rl.actors.processes.liveness import find_stopped
from vla_rl.actors.processes.started_process import ProcessDescriptor
from vla_rl.engines.vllm.pool import ReplicaPool
from vla_rl.engines.vllm.process import EngineLifecycle, EngineThread, EngineWatch, describe_exit
from vla_rl.engines.vllm.served import NO_RULES, Answer, EngineLayout, EngineRequest
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.types import Sampling


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("code", "is_killed", "told"),
    [
        ("import sys; sys.exit(3)", False, "its process ended with status 3"),
        ("import time; time.sleep(60)", True, "its process was killed by SIGKILL"),
    ],
)
async def test_how_a_process_ended_is_told_once_it_has(
    code: str, is_killed: bool, told: str
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as started:  # noqa: ASYNC220
        ended = asyncio.Event()
        assert describe_exit(0) == "its process is gone"  # no process was started yet
        process = ProcessDescriptor(started.pid, ended.set)
        if is_killed:
            process.send_kill()
        async with asyncio.timeout(60):
            await ended.wait()
        assert describe_exit(started.pid) == told
        process.send_kill()  # its number may be another process's by now: nothing is done


def start_sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"])


@pytest.mark.timeout(120)
async def test_cancelling_work_that_waits_for_its_process_kills_that_and_waits_for_both() -> None:
    thread = EngineThread("engine")
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop, ended = asyncio.get_running_loop(), []

    def start_and_wait() -> None:
        for _ in range(2):  # what begins after the first kill is killed as well
            with start_sleeper() as process:
                if not started.done():
                    loop.call_soon_threadsafe(started.set_result, process.pid)
                ended.append(process.wait())

    working = asyncio.create_task(thread.run_work(start_and_wait))
    await started
    working.cancel()
    await asyncio.wait([working])
    assert working.cancelled()
    assert ended == [-signal.SIGKILL, -signal.SIGKILL]
    assert thread.processes() == []
    await thread.stop_thread()


@pytest.mark.timeout(120)
async def test_the_end_of_its_process_ends_what_waits_for_it() -> None:
    lifecycle = EngineLifecycle("engine")
    lifecycle.start_watch()
    process = await lifecycle.start_processes(start_sleeper)
    lifecycle.watch_process(process.pid)
    process.kill()
    with pytest.raises(TimeoutError):
        async with lifecycle.limit(None):  # no deadline of its own
            await asyncio.Event().wait()
    assert lifecycle.died.is_set()
    assert str(lifecycle.make_exit_error()) == str(
        ActorDied("engine", process.pid, "its process was killed by SIGKILL")
    )
    process.wait()
    await lifecycle.kill_and_release()


@pytest.mark.timeout(120)
async def test_a_missed_deadline_kills_an_engine_that_lives_and_only_reports_one_that_has_died() -> (
    None
):
    lifecycle = EngineLifecycle("engine")
    process = await lifecycle.start_processes(start_sleeper)
    lifecycle.watch_process(process.pid)
    frozen = lifecycle.mark_overdue("gave no token")
    assert isinstance(frozen, ActorFrozen)
    assert await asyncio.to_thread(process.wait) == -9
    later = lifecycle.mark_overdue("did not answer")
    assert (type(later), later.cause, lifecycle.cause) == (
        ActorDied,
        "gave no token",
        "gave no token",
    )
    await lifecycle.kill_and_release()


@pytest.mark.timeout(120)
async def test_the_first_cause_of_death_stays() -> None:
    lifecycle = EngineLifecycle("engine")
    assert (lifecycle.pid, lifecycle.died.is_set(), lifecycle.cause) == (0, False, "not started")
    assert lifecycle.mark_dead("could not start").cause == "could not start"
    lifecycle.mark_dead("closed")
    assert lifecycle.make_exit_error().cause == "could not start"
    await lifecycle.kill_and_release()


@pytest.mark.timeout(120)
async def test_closing_kills_a_process_that_has_not_reported_its_id_yet() -> None:
    lifecycle = EngineLifecycle("engine")
    process = await lifecycle.start_processes(start_sleeper)
    lifecycle.mark_dead("closed")
    await lifecycle.kill_and_release()
    assert await asyncio.to_thread(process.wait) == -9


SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]

DEADLINE_S = 2.0

OBSERVER = """
import asyncio, signal, subprocess, sys
from vla_rl.engines.vllm import process

process.LOOK_EVERY_S, process.STOPPED_AFTER_S = 0.01, 0.1

async def main():
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    resumed, looked, frozen, looks_left = asyncio.Event(), asyncio.Event(), [], 10

    def processes():
        nonlocal looks_left
        looks_left -= resumed.is_set()
        if looks_left == 0:
            looked.set()
        return [engine.pid]

    asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, resumed.set)
    observer = process.EngineWatch(processes, frozen.append)
    observer.start_watch()
    try:
        async with observer.limit(float(sys.argv[1])):
            print(engine.pid, flush=True)
            await looked.wait()
        print("alarm" if frozen else "calm", flush=True)
    except TimeoutError:
        print("too late", flush=True)
    observer.end_watch()
    engine.kill()
    engine.wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread("engine")
    yield thread
    await thread.stop_thread()


@pytest.mark.timeout(120)
async def test_a_process_that_is_stopped_is_named_and_one_that_sleeps_is_not(
    thread: EngineThread,
) -> None:
    with (
        await thread.run_work(start_sleeper) as sleeps,
        await thread.run_work(start_sleeper) as stopped,
    ):
        assert sorted(thread.processes()) == sorted([sleeps.pid, stopped.pid])
        frozen: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        watch = EngineWatch(
            thread.processes, lambda pid: (watch.end_watch(), frozen.set_result(pid))[1]
        )
        watch.start_watch()
        stopped.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with watch.limit(None):  # for as long as it lives
                await asyncio.Event().wait()
        assert await frozen == stopped.pid
        with pytest.raises(TimeoutError):
            async with watch.limit(3600.0):
                await asyncio.Event().wait()
        thread.kill_processes()


@pytest.mark.timeout(120)
async def test_ctrl_z_and_fg_of_observer_and_engine_raise_no_alarm_and_use_up_no_deadline() -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OBSERVER, str(DEADLINE_S)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as observer:
        assert observer.stdout is not None
        engine = int(observer.stdout.readline())
        os.killpg(observer.pid, signal.SIGSTOP)
        while not (find_stopped([observer.pid]) and find_stopped([engine])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.2 * DEADLINE_S)
        os.killpg(observer.pid, signal.SIGCONT)
        assert observer.stdout.read() == "calm\n"


CHUNKS = EngineLayout(config={}, runner="pooling", context_size=9, num_tokens=2)
REPLIES = EngineLayout(
    config={}, runner="generate", context_size=9, num_tokens=None, reuses_prefixes=True
)


def answered(*versions: int, finish_reason: str = "stop") -> Answer:
    size = len(versions)
    return Answer(
        np.zeros(size, np.int64), np.zeros(size, np.float32), np.array(versions), finish_reason
    )


class Replica:
    """Answers with what it was given, in this order; an error is raised."""

    def __init__(self, *outcomes: Answer | Exception) -> None:
        self.outcomes, self.num_asked, self.num_running, self.is_ready = [*outcomes], 0, 0, True

    async def answer_request(self, *_: object) -> Answer:
        self.num_asked += 1
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            self.is_ready = False
            raise outcome
        return outcome


def router(*replicas: Replica, layout: EngineLayout = CHUNKS, attempts: int = 3) -> ReplicaPool:
    slots: Any = [SimpleNamespace(replica=replica, failure=None) for replica in replicas]
    made = ReplicaPool(slots, layout, attempts)
    made.is_open = True
    return made


async def ask(asked: ReplicaPool) -> Answer:
    return await asked.answer_request(EngineRequest([1]), Sampling(), 2, NO_RULES)


def dead() -> ActorDied:
    return ActorDied("vllm-0", 1, "its process is gone")


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_a_request_goes_to_the_least_loaded_engine() -> None:
    busy, free, resting = Replica(), Replica(answered(4, 4)), Replica()
    busy.num_running, free.num_running, resting.is_ready = 3, 2, False
    await ask(router(busy, free, resting))
    assert (busy.num_asked, free.num_asked, resting.num_asked) == (0, 1, 0)


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_the_request_of_an_engine_that_dies_is_answered_by_another_one() -> None:
    dying, living = Replica(dead()), Replica(answered(4, 4))
    living.num_running = 1
    assert (await ask(router(dying, living))).versions.tolist() == [4, 4]
    assert (dying.num_asked, living.num_asked) == (1, 1)


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_a_request_that_kills_engine_after_engine_fails_at_the_last_attempt() -> None:
    replicas = [Replica(dead()), Replica(dead()), Replica(answered(0))]
    with pytest.raises(ActorDied, match="its process is gone"):
        await ask(router(*replicas, attempts=2))
    assert [replica.num_asked for replica in replicas] == [1, 1, 0]


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
@pytest.mark.parametrize("first", [answered(1, 2), answered(finish_reason="abort")])
async def test_a_chunk_of_two_versions_or_an_aborted_one_is_asked_again(first: Answer) -> None:
    replica = Replica(first, answered(2, 2))
    assert (await ask(router(replica))).versions.tolist() == [2, 2]


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_a_reply_may_have_tokens_of_two_versions() -> None:
    asked = router(Replica(answered(1, 2)), layout=REPLIES)
    assert (await ask(asked)).versions.tolist() == [1, 2]


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_turns_of_a_conversation_stay_with_the_engine_that_has_read_it() -> None:
    first, other = Replica(answered(0), answered(0)), Replica(answered(0))
    asked = router(first, other, layout=REPLIES)
    await ask(asked)
    first.num_running = 5
    await ask(asked)
    assert (first.num_asked, other.num_asked) == (2, 0)
    await asyncio.create_task(ask(asked))  # another conversation
    assert other.num_asked == 1


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_a_caller_without_an_engine_waits_for_one_and_is_told_if_none_will_come() -> None:
    replica = Replica(answered(7))
    replica.is_ready = False
    asked = router(replica)
    waiting = asyncio.create_task(ask(asked))
    await asyncio.sleep(0)
    replica.is_ready = True
    asked.wake_callers()
    assert (await waiting).versions.tolist() == [7]
    replica.is_ready = False
    slots: Any = asked._slots
    slots[0].failure = ActorDied("vllm-0", 1, "not started again")
    with pytest.raises(ActorDied, match="not started again"):
        await ask(asked)
    asked.is_open = False
    with pytest.raises(RuntimeError, match="the engine is not open"):
        await ask(asked)
    assert asked.stats(now=1.0, opened_at=0.0).num_queued == 0
