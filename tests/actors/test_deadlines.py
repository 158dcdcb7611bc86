"""Waits that last too long: a call that has missed its deadline is ended, a stall is told by the watchdog.

Which deadline a call gets; the watchdog speaks while the loop waits, also while it is blocked.
"""

import asyncio
import io
import math
import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from sample_actors import Counter

from vla_rl.actors import (
    Actor,
    Runtime,
    Watchdog,
    actor_method,
    count_progress,
    list_waits,
    note_progress,
    waiting,
)
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.deadlines import (
    CallDeadlines,
    DeadlineWatch,
    resolve_deadlines,
    resolve_limits,
)
from vla_rl.actors.calls.pending import PendingCall, PendingStream

TABLE = get_method_table(Counter)
ADD = TABLE.by_name["add"]


class Limit:
    """Allows what it was told to, and remembers what it learned."""

    def __init__(self, limit_s: float | None) -> None:
        self.allowed_s, self.learned = limit_s, list[tuple[int, float]]()

    def num_units(self, args: tuple[Any, ...]) -> int:
        return len(args)

    def limit_s(self, num_units: int) -> float | None:
        return self.allowed_s

    def record_duration(self, num_units: int, seconds: float) -> None:
        self.learned.append((num_units, seconds))

    def record_overdue(self, num_units: int) -> str:
        return f"{num_units} units never took so long"


class Watched:
    """Deadlines over a table of calls, with what they asked for."""

    def __init__(self, deadline_s: float | None, limit: Limit | None = None) -> None:
        self.calls: dict[int, PendingCall] = {}
        self.channel = SimpleNamespace(is_ending=False, poll=lambda: None)
        self.cancelled: list[int] = []
        self.frozen = asyncio.get_running_loop().create_future()
        channel: Any = self.channel
        self.deadlines = CallDeadlines(
            "counter",
            self.calls,
            lambda: channel,
            [deadline_s] * len(TABLE.methods),
            {} if limit is None else {ADD.index: limit},
            freeze=self._freeze,
            cancel=self.cancelled.append,
        )

    def _freeze(self, cause: str) -> None:
        self.calls.clear()
        self.frozen.set_result(cause)

    def send(self, kind: type[PendingCall] = PendingCall) -> PendingCall:
        loop: Any = asyncio.get_running_loop()
        decoder: Any = None
        pending = kind(loop, ADD, decoder, asyncio.current_task())
        self.calls[len(self.calls)] = pending
        self.deadlines.watch_call(pending, (1, 2))
        return pending

    async def cause(self) -> str:
        async with asyncio.timeout(10):
            cause: str = await self.frozen
        return cause


@pytest.mark.parametrize(
    ("own_s", "limit_s", "expected_s"),
    [(5.0, None, 5.0), (5.0, 2.0, 2.0), (5.0, 9.0, 5.0), (None, 2.0, 2.0), (None, None, None)],
)
async def test_a_call_gets_the_shorter_of_its_methods_deadline_and_its_limit(
    own_s: float | None, limit_s: float | None, expected_s: float | None
) -> None:
    watched = Watched(own_s, Limit(limit_s))
    assert watched.send().deadline_s == expected_s
    watched.deadlines.stop_watching()


async def test_a_missed_deadline_freezes_the_actor_and_names_method_and_limit() -> None:
    watched = Watched(0.01)
    watched.send()
    assert await watched.cause() == "add did not answer within 0.01 s"
    watched = Watched(60.0, Limit(0.01))
    watched.send()
    assert await watched.cause() == "add did not answer within 0.01 s (2 units never took so long)"


async def test_a_limit_that_has_learned_since_gives_an_overdue_call_more_time() -> None:
    limit = Limit(0.01)
    watched = Watched(0.2, limit)
    pending = watched.send()
    limit.allowed_s = 0.1
    assert await watched.cause() == "add did not answer within 0.1 s (2 units never took so long)"
    assert time.monotonic() - pending.since >= 0.1


async def test_a_limit_learns_the_time_without_the_wait_behind_another_call() -> None:
    limit = Limit(None)
    watched = Watched(None, limit)
    first, second = watched.send(), watched.send()
    first.since = second.since = time.monotonic() - 10.0
    watched.deadlines.record_answer(first)
    watched.deadlines.record_answer(second)
    (_, slow_s), (units, quick_s) = limit.learned
    assert units == 2
    assert slow_s >= 10.0
    assert quick_s < 5.0


async def test_an_actor_whose_end_is_being_reported_is_not_frozen() -> None:
    watched = Watched(0.01)
    watched.channel.is_ending = True
    watched.send()
    await asyncio.sleep(0.1)
    assert not watched.frozen.done()


async def test_a_call_inside_the_iteration_over_a_stream_is_refused_and_the_actor_goes_on() -> None:
    watched = Watched(0.01)
    stream = watched.send(PendingStream)  # without credit: it waits for its consumer
    inner = watched.send()
    async with asyncio.timeout(10):
        with pytest.raises(RuntimeError, match="during the iteration over a stream"):
            await inner.future
    assert isinstance(stream.future.exception(), RuntimeError)
    assert watched.cancelled == [0, 1]
    assert not watched.frozen.done()
    watched.deadlines.stop_watching()


class Sim(Actor):
    async def reset(self) -> None: ...

    @actor_method(deadline_s=5.0)
    async def step(self) -> None: ...


def deadlines(actors: float | None = None, **by_name: float) -> dict[str, float | None]:
    table = get_method_table(Sim)
    found = resolve_deadlines(table, actors, by_name)
    return dict(zip(table.by_name, found, strict=True))


def test_the_nearest_deadline_counts() -> None:
    assert deadlines() == {"reset": None, "step": 5.0}
    assert deadlines(9.0) == {"reset": 9.0, "step": 5.0}
    assert deadlines(9.0, step=1.0, reset=2.0) == {"reset": 2.0, "step": 1.0}


@pytest.mark.parametrize("wrong", [{"stop": 1.0}, {"step": 0.0}, {"step": -1.0}])
def test_a_deadline_of_no_method_or_of_no_time_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"deadline of \w+ is .* s, expected more than 0 s"):
        deadlines(**wrong)


def test_a_limit_of_no_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a limit of stop, expected one of \['reset', 'step'\]"):
        resolve_limits(get_method_table(Sim), {"stop": Limit(1.0)})


def call(
    since: float, deadline_s: float | None = 10.0, *, concurrent: bool = False, waits: bool = False
) -> Any:
    """Return what the watch reads of a call."""
    return SimpleNamespace(
        since=since,
        deadline_s=deadline_s,
        concurrent=concurrent,
        expects_answer=not waits,
        waits_for_caller=lambda other: False,
    )


class WatchedCalls:
    """A watch over some calls, and the calls that it reported."""

    def __init__(self, *calls: Any) -> None:
        self.calls = dict(enumerate(calls))
        self.overdue: list[Any] = []
        self.reported = asyncio.Event()
        self.watch = DeadlineWatch(lambda: self.calls, lambda: None, self._on_overdue)

    def _on_overdue(self, late: Any) -> None:
        self.overdue.append(late)
        self.reported.set()

    async def checked(self) -> list[Any]:
        """Let the watch check now, and return what it reported."""
        self.watch.schedule_check(time.monotonic())
        async with asyncio.timeout(5):
            await self.reported.wait()
        self.watch.stop_timer()
        return self.overdue


async def test_a_call_whose_deadline_has_passed_is_reported() -> None:
    late = call(time.monotonic() - 11.0)
    assert await WatchedCalls(late).checked() == [late]


async def test_a_call_that_waits_behind_another_has_its_time_before_it() -> None:
    now = time.monotonic()
    first, second = call(now, None), call(now - 11.0)
    late = call(now - 11.0, concurrent=True)
    assert await WatchedCalls(first, second, late).checked() == [late]


async def test_the_time_of_a_call_begins_with_the_last_answer() -> None:
    now = time.monotonic()
    watched = WatchedCalls(call(now - 11.0), late := call(now - 11.0, concurrent=True))
    watched.watch.answered_at = now
    assert await watched.checked() == [late]


async def test_a_stream_that_waits_for_its_consumer_is_not_late() -> None:
    now = time.monotonic()
    waits, late = call(now - 99.0, concurrent=True, waits=True), call(now - 11.0, concurrent=True)
    assert await WatchedCalls(waits, late).checked() == [late]


async def test_time_in_which_our_loop_stood_still_is_given_back_but_never_more() -> None:
    now = time.monotonic()
    old, young = call(now - 8.0), call(now - 1.0)
    watched = WatchedCalls(old, young)
    watched.watch.extend_deadlines(5.0)
    assert old.since == pytest.approx(now - 3.0)
    assert now <= young.since <= time.monotonic()


async def test_a_stopped_watch_looks_again_only_when_it_is_asked_to() -> None:
    watched = WatchedCalls(call(time.monotonic() - 11.0))
    watched.watch.schedule_check(time.monotonic())
    watched.watch.stop_timer()
    assert watched.watch.next_look == math.inf
    assert len(await watched.checked()) == 1


class Told(io.StringIO):
    """Says when a whole report was written."""

    def __init__(self) -> None:
        super().__init__()
        self.reported = threading.Event()

    def flush(self) -> None:
        self.reported.set()


async def test_a_stall_is_reported_with_who_waits_for_whom_and_every_task() -> None:
    out = Told()
    async with asyncio.timeout(30), Runtime() as runtime:
        counter = await runtime.spawn(Counter, name="env-3")
        call = asyncio.create_task(counter.wait_for_gate("x"), name="episode 12")
        await counter.cancelled()  # its answer says that the call before it has arrived
        with waiting("trainer", on="group 7"), Watchdog(stall_after_s=0.2, out=out):
            await asyncio.to_thread(out.reported.wait, 20)
        call.cancel()
    report = out.getvalue()
    assert re.search(r"watchdog: no progress for \d+\.\d s", report)
    assert "trainer waits for group 7 since" in report
    assert "episode 12 waits for env-3.wait_for_gate since" in report
    assert "task 'episode 12':" in report
    assert "in ActorClient.call" in report
    assert "in Counter.wait_for_gate" in report  # the innermost frame of the actor's own task


async def test_what_stands_at_one_line_is_reported_once() -> None:
    out = Told()
    gate = asyncio.Event()

    async def wait_for_gate() -> None:
        with waiting("runtime", on="its fork server"):
            await gate.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(wait_for_gate(), name=f"starter {number}")
        await asyncio.sleep(0)
        with Watchdog(stall_after_s=0.2, out=out):
            await asyncio.to_thread(out.reported.wait, 20)
        gate.set()
    report = out.getvalue()
    assert re.search(r"runtime waits for its fork server since \d+\.\d s \(10 times\)\n", report)
    first_eight = ", ".join(repr(f"starter {number}") for number in range(8))
    assert f"task {first_eight} and 2 more:\n" in report
    assert report.count("in test_what_stands_at_one_line_is_reported_once.<locals>") == 1


async def test_a_blocked_loop_is_reported_with_the_line_that_blocks_it() -> None:
    out = Told()
    with Watchdog(stall_after_s=0.2, out=out):
        while "# this very line blocks the loop" not in out.getvalue():
            out.reported.clear()
            out.reported.wait(20)  # this very line blocks the loop
    assert "out.reported.wait(20)  # this very line blocks the loop" in out.getvalue()


async def test_progress_keeps_the_watchdog_quiet() -> None:
    out = Told()
    with Watchdog(stall_after_s=60.0, out=out) as watchdog:
        for _ in range(100):
            note_progress("episodes")
            await asyncio.sleep(0)
    assert watchdog.num_reports == 0
    assert count_progress()["episodes"] >= 100


def test_a_watchdog_may_abort_the_process() -> None:
    program = (
        "import asyncio\nfrom vla_rl.actors import Watchdog\n"
        "async def main():\n    with Watchdog(stall_after_s=0.2, abort=True):\n        await "
        "asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == -6  # SIGABRT
    assert "watchdog: no progress for" in ended.stderr


async def test_a_stall_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="stall_after_s is 0, expected more than 0 seconds"):
        Watchdog(stall_after_s=0)


def test_a_wait_is_listed_while_its_block_runs() -> None:
    with waiting("episode 1", on="env-0"):
        (wait,) = [wait for wait in list_waits() if wait.who == "episode 1"]
        assert wait.on == "env-0"
        assert wait.describe(wait.since + 4.2) == "episode 1 waits for env-0 since 4.2 s"
    assert [wait for wait in list_waits() if wait.who == "episode 1"] == []


class BrokenPipe(io.StringIO):
    """Nobody reads it any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(f"{len(text)} characters for nobody")


async def test_a_watchdog_that_cannot_print_goes_on_watching(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Watchdog(stall_after_s=0.05, out=BrokenPipe()) as watchdog:
        async with asyncio.timeout(10):
            while len(caplog.records) < 2:  # noqa: ASYNC110  it speaks in another thread
                await asyncio.sleep(0.01)
    assert watchdog.num_reports == 0
    assert "could not print its report" in caplog.text


def test_a_watchdog_that_cannot_print_aborts_all_the_same() -> None:
    program = (
        "import asyncio, sys\nfrom vla_rl.actors import Watchdog\n"
        "async def main():\n    with Watchdog(stall_after_s=0.2, abort=True, "
        "out=open('/dev/full', 'w')):\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False
    )
    assert ended.returncode == -6  # SIGABRT
