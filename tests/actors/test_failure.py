"""What happens when processes die, freeze, or lose their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from processes import all_end, children_of, named_memory_of, those_left
from sample_actors import Counter, CrashLoop, DiesAtStart, Unspeakable

from vla_rl.actors import ChildProcess, InLoop, Placement, RestartPolicy, Runtime
from vla_rl.actors.calls.handles import get_client
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.util.error_reports import make_report, restore_error

PROGRAM = Path(__file__).parent / "support" / "programs.py"


async def test_a_killed_child_fails_every_pending_and_later_call_with_its_name_and_signal() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, name="env-3", placement=ChildProcess())
        pid = runtime.info(counter).pid
        calls = [asyncio.create_task(counter.wait_for_gate(f"caller {n}")) for n in range(5)]
        await counter.cancelled()
        os.kill(pid, signal.SIGKILL)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, ActorDied) for outcome in outcomes)
        error = outcomes[0]
        assert isinstance(error, ActorDied)
        assert (error.name, error.pid, error.cause) == ("env-3", pid, "SIGKILL")
        with pytest.raises(ActorDied, match="env-3"):
            await counter.total()
        assert runtime.info(counter).state == "dead"


async def test_a_death_carries_the_last_words_and_the_exit_code() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        with pytest.raises(ActorDied, match="exit code 3") as raised:
            await counter.say_and_exit("EGL: no device\nno way to draw", 3)
        assert raised.value.stderr_tail[-2:] == ("EGL: no device", "no way to draw")


async def test_what_a_child_writes_to_stderr_is_passed_on_under_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, name="talker", placement=ChildProcess())
        with pytest.raises(ActorDied):
            await counter.say_and_exit("farewell", 0)
    assert "[talker] farewell\n" in capsys.readouterr().err


async def test_a_process_that_dies_before_it_is_ready_raises_in_spawn() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        with pytest.raises(ActorDied, match="exit code 7") as raised:
            await runtime.spawn(DiesAtStart, placement=ChildProcess())
        assert raised.value.stderr_tail == ("out of simulators",)


async def test_a_stopped_process_is_caught_by_its_deadline_and_replaced() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        deadlines_s = {"add": 0.3}
        counter = await runtime.spawn(
            Counter, 5, placement=ChildProcess(), deadlines_s=deadlines_s, restart=RestartPolicy()
        )
        frozen = runtime.info(counter).pid
        os.kill(frozen, signal.SIGSTOP)
        with pytest.raises(ActorFrozen) as raised:
            await counter.add(1)
        assert raised.value.pid == frozen
        assert await counter.total() == 5
        assert runtime.info(counter).pid != frozen
        with pytest.raises(ProcessLookupError):
            os.kill(frozen, 0)


async def test_a_blocked_child_does_not_delay_the_notice_of_its_death() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        call = asyncio.create_task(counter.block(3600))
        await asyncio.sleep(0)
        os.kill(runtime.info(counter).pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match="SIGKILL"):
            await call


async def test_a_caller_whose_own_loop_was_busy_does_not_call_the_actor_frozen() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess(), deadline_s=0.2)
        call = asyncio.create_task(counter.add(1))
        await asyncio.sleep(0)
        began = time.monotonic()
        assert get_client(counter)._calls.channel._socket._socket.poll(
            20_000
        )  # the answer has come
        time.sleep(max(0.0, began + 0.5 - time.monotonic()))  # noqa: ASYNC251  a long update on this loop
        assert await call == 1


async def test_calls_made_while_an_actor_is_replaced_reach_the_next_incarnation() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        actor = await runtime.spawn(CrashLoop, placement=ChildProcess(), restart=RestartPolicy())
        first = await actor.pid()
        with pytest.raises(ActorDied, match="exit code 9"):
            await actor.exit()
        assert await actor.pid() != first


async def test_an_escalated_death_cancels_whatever_the_owner_was_doing() -> None:
    cancelled = asyncio.Event()

    async def own() -> None:
        async with Runtime() as runtime:
            policy = RestartPolicy(max_restarts=0, within_s=1.0)
            actor = await runtime.spawn(
                CrashLoop, name="fragile", placement=ChildProcess(), restart=policy
            )
            with pytest.raises(ActorDied):
                await actor.exit()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    async with asyncio.timeout(30):
        with pytest.raises(
            ActorDied, match=r"'fragile'.*exit code 9.*more often than its restart policy allows"
        ):
            await own()
    assert cancelled.is_set()


async def test_an_escalated_death_stops_the_other_actors_too() -> None:
    survivors = []

    async def own() -> None:
        async with Runtime() as runtime:
            survivors.append(await runtime.spawn(Counter, placement=ChildProcess()))
            survivors.append(await runtime.spawn(Counter))
            policy = RestartPolicy(max_restarts=0, within_s=1.0)
            fragile = await runtime.spawn(CrashLoop, placement=ChildProcess(), restart=policy)
            with pytest.raises(ActorDied):
                await fragile.exit()
            await asyncio.Event().wait()

    before = children_of(os.getpid())
    async with asyncio.timeout(30):
        with pytest.raises(ActorDied, match="exit code 9"):
            await own()
        assert children_of(os.getpid()) <= before
        for survivor in survivors:
            with pytest.raises(ActorDied, match="stopped by its owner"):
                await survivor.total()


async def test_cancelling_the_owner_stops_its_children() -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def own() -> None:
        async with Runtime() as runtime:
            counter = await runtime.spawn(Counter, placement=ChildProcess())
            started.set_result(runtime.info(counter).pid)
            await asyncio.Event().wait()

    async with asyncio.timeout(30):
        owner = asyncio.create_task(own())
        pid = await started
        owner.cancel()
        await asyncio.wait([owner])
    assert owner.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_stop_that_was_cancelled_is_finished_with_the_runtime() -> None:
    async with asyncio.timeout(30):
        async with Runtime(stop_grace_s=0.2) as runtime:
            counter = await runtime.spawn(Counter, placement=ChildProcess())
            pid = runtime.info(counter).pid
            os.kill(pid, signal.SIGSTOP)
            stopping = asyncio.create_task(runtime.stop(counter))
            await asyncio.sleep(0)  # it has begun
            stopping.cancel()
            await asyncio.wait([stopping])
            assert stopping.cancelled()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_call_that_runs_beside_others_is_told_that_its_actor_was_stopped() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        running = asyncio.create_task(counter.wait_concurrently("a"))
        await counter.cancelled()  # its answer says that the call before it has arrived
        await runtime.stop(counter)
        with pytest.raises(ActorDied, match="stopped while this call was running"):
            await running


async def test_cancelling_spawn_leaves_no_process() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        before = children_of(os.getpid())
        spawning = asyncio.create_task(runtime.spawn(Counter, placement=ChildProcess()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        spawning.cancel()
        await asyncio.wait([spawning])
        assert spawning.cancelled()
        assert children_of(os.getpid()) <= before


async def test_the_environment_of_a_child_can_be_set() -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess(env={"OMP_NUM_THREADS": "1"}))
        assert await counter.environment("OMP_NUM_THREADS") == "1"


def test_kill_9_of_the_parent_leaves_no_child_no_socket_and_no_shared_memory(
    tmp_path: Path, program_environment: dict[str, str]
) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "parent", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=program_environment,
    ) as program:
        assert program.stdout is not None
        children = [int(word) for word in program.stdout.readline().split()]
        pidfds = [os.pidfd_open(pid) for pid in children]
        assert len(children) == 3
        memory = named_memory_of([program.pid, *children])
        assert f"vla_rl-{program.pid}-" in Path("/proc/net/unix").read_text()
        program.kill()
        program.wait()
        assert all_end(pidfds, within_s=20)
        assert f"vla_rl-{program.pid}-" not in Path("/proc/net/unix").read_text()
        assert those_left(memory) == []
        assert list(tmp_path.iterdir()) == []


def test_ctrl_c_stops_in_order_because_children_leave_it_to_their_parent(
    tmp_path: Path, program_environment: dict[str, str]
) -> None:
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "parent", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=program_environment,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        pidfds = [os.pidfd_open(int(word)) for word in program.stdout.readline().split()]
        os.killpg(program.pid, signal.SIGINT)
        assert program.wait(timeout=30) == 130
        assert all_end(pidfds, within_s=1)
    assert (tmp_path / "stopped").read_text() == "stopped"


class ShortAfter:
    """A limit for calls of `Counter.wait_for_gate`, in which nothing is measured."""

    def __init__(self, limits_s: list[float | None]) -> None:
        self._limits_s = limits_s
        self.noted: list[tuple[int, bool]] = []
        self.num_overdue = 0

    def num_units(self, args: tuple[Any, ...]) -> int:
        return len(args[0])

    def limit_s(self, num_units: int) -> float | None:
        return self._limits_s.pop(0) if len(self._limits_s) > 1 else self._limits_s[0]

    def record_duration(self, num_units: int, seconds: float) -> None:
        self.noted.append((num_units, seconds > 0))

    def record_overdue(self, num_units: int) -> str:
        self.num_overdue += 1
        return f"{num_units} letters"


async def test_a_call_is_ended_by_a_limit_that_earlier_calls_have_set() -> None:
    limit = ShortAfter([None, 0.2, 0.3])  # longer when it is looked at again
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(
            Counter, placement=ChildProcess(), deadline_s=3600, limits={"wait_for_gate": limit}
        )
        calls = [asyncio.create_task(counter.wait_for_gate("abc"))]
        await counter.open_gate()
        assert await calls[0] == "abc"
        os.kill(runtime.info(counter).pid, signal.SIGSTOP)
        with pytest.raises(
            ActorFrozen, match=r"wait_for_gate did not answer within 0\.3 s \(5 letters\)"
        ):
            await counter.wait_for_gate("abcde")
    assert limit.noted == [(3, True)]
    assert limit.num_overdue == 1


async def test_the_shorter_of_deadline_and_limit_counts() -> None:
    limit = ShortAfter([3600.0])
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(
            Counter,
            placement=ChildProcess(),
            deadlines_s={"wait_for_gate": 0.3},
            limits={"wait_for_gate": limit},
        )
        with pytest.raises(ActorFrozen, match=r"wait_for_gate did not answer within 0\.3 s$"):
            await counter.wait_for_gate("abc")
    assert limit.num_overdue == 0


class Odd(Exception):
    """An exception whose own code is broken."""

    @property
    def args(self) -> tuple[object, ...]:  # type: ignore[override]
        raise OSError("no arguments")


@pytest.mark.parametrize("placement", [InLoop(), ChildProcess()], ids=["in_loop", "child_process"])
async def test_an_exception_that_cannot_be_written_as_it_is_reaches_its_caller(
    placement: Placement,
) -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement)
        with pytest.raises(ValueError, match=r"caf\\\\udcff"):
            await counter.raise_surrogate()
        with pytest.raises(ValueError, match=r"its __repr__ raised RuntimeError"):
            await counter.raise_unspeakable()
        assert await counter.add(2) == 2


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError(Unspeakable()), "its __repr__ raised RuntimeError"),
        (ValueError("caf\udcff"), "caf\\udcff"),
        (ValueError(np.longdouble(1.5)), "1.5"),
        (ValueError([1 << 70, np.float32(0.5)]), "0.5"),
        (Odd(), "its report failed with OSError"),
    ],
)
def test_every_report_can_be_sent(error: Exception, words: str) -> None:
    report = make_report(error)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=type(report)) == report
    assert words in str(restore_error(report, "counter", 7))


def test_an_argument_that_holds_itself_is_reported() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert "its report failed with RecursionError" in make_report(ValueError(endless)).message
