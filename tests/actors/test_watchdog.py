"""The watchdog speaks while the loop waits, and while it is blocked."""

import asyncio
import io
import os
import re
import subprocess
import sys
import threading

import pytest
from sample_actors import Counter

from vla_rl.actors import Runtime, Watchdog, count_progress, list_waits, note_progress, waiting


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


def test_actors_are_imported_without_torch() -> None:
    program = (
        "import sys, vla_rl.actors; sys.exit('torch' in sys.modules or 'gymnasium' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={**os.environ})


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
