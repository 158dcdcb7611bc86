"""Programs with actors, to be killed, interrupted or stopped by a test.

    programs.py parent FOLDER           prints the pids of its actors
    programs.py forking                 prints those of its forked actors, the server's last
    programs.py waiting [DEADLINE_S]    prints the pids of all its processes once

`waiting` takes a line on stdin for each round of calls: how long each call is to take (s). For each
round it prints a line when it has made the calls, and then how every actor answered: its pid, or the
name of the error.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import numpy as np
from hooks import Heir
from sample_actors import Counter, WritesOnStop

from vla_rl.actors import ChildProcess, ForkServer, PrepareHook, Runtime

REMEMBERING = ChildProcess(
    fork_from=ForkServer(prepare=(PrepareHook("hooks:remember", {"word": "hello"}),))
)
FORKED = ChildProcess(fork_from=ForkServer(), frozen_after_s=1.0)
FRESH = ChildProcess(frozen_after_s=1.0)


async def parent(folder: str) -> None:
    async with Runtime(name="program") as runtime:
        counters = [await runtime.spawn(Counter, placement=ChildProcess()) for _ in range(2)]
        writer = await runtime.spawn(
            WritesOnStop, str(Path(folder) / "stopped"), placement=ChildProcess()
        )
        held = [await counter.echo_array(np.zeros(300_000, dtype=np.uint8)) for counter in counters]
        busy = asyncio.create_task(counters[0].block(3600))
        idle = asyncio.create_task(counters[1].wait_for_gate("for ever"))
        print(*(runtime.info(actor).pid for actor in (*counters, writer)), flush=True)
        try:
            await asyncio.gather(busy, idle)
        finally:
            print(len(held), flush=True)


async def forking() -> None:
    async with Runtime(name="program") as runtime:
        counter = await runtime.spawn(Counter, placement=REMEMBERING)
        stuck = await runtime.spawn(Heir, placement=REMEMBERING)
        held = await counter.echo_array(np.zeros(300_000, dtype=np.uint8))
        server = await stuck.parent()
        sticking = asyncio.create_task(stuck.hold_the_interpreter())
        while "nanosleep" not in wait_channel(runtime.info(stuck).pid):  # noqa: ASYNC110  only the kernel knows
            await asyncio.sleep(0.01)
        print(runtime.info(counter).pid, runtime.info(stuck).pid, server, flush=True)
        await sticking
        print(held.size, os.getpid())


def wait_channel(pid: int) -> str:
    """Where in the kernel a process waits."""
    with open(f"/proc/{pid}/wchan") as file:
        return file.read()


async def waiting(deadline_s: str | None = None) -> None:
    async with Runtime(name="program") as runtime:
        counters = [
            await runtime.spawn(
                Counter,
                placement=placement,
                deadline_s=None if deadline_s is None else float(deadline_s),
            )
            for placement in (FRESH, FORKED, FORKED)
        ]
        print(os.getpid(), *(runtime.info(counter).pid for counter in counters), flush=True)
        while takes_s := await asyncio.to_thread(sys.stdin.readline):
            calls = [
                asyncio.create_task(answer_of(counter, float(takes_s))) for counter in counters
            ]
            await asyncio.sleep(0)  # they are on their way
            print("calling", flush=True)
            print(*(await asyncio.gather(*calls)), flush=True)


async def answer_of(counter: Counter, takes_s: float) -> str:
    try:
        await counter.work(takes_s)
        return str(await counter.pid())
    except Exception as error:  # the test wants its name
        return type(error).__name__


PROGRAMS = {"parent": parent, "forking": forking, "waiting": waiting}

if __name__ == "__main__":
    # who was started in the background by a shell ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asyncio.run(PROGRAMS[sys.argv[1]](*sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)
