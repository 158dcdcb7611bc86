"""A program with actors whose processes a test stops: `waiting_program.py [DEADLINE_S]`, and a
line on stdin for each round of calls: how long each call is to take (s).

Prints the pids of all its processes once. For each round it prints a line when it has made the
calls, and then how every actor answered: its pid, or the name of the error.
"""

import asyncio
import os
import sys

from sample_actors import Counter

from vla_rl.actors import ChildProcess, ForkServer, Runtime

FORKED = ChildProcess(fork_from=ForkServer(), frozen_after_s=1.0)
FRESH = ChildProcess(frozen_after_s=1.0)


async def answer_of(counter: Counter, takes_s: float) -> str:
    try:
        await counter.work(takes_s)
        return str(await counter.pid())
    except Exception as error:  # the test wants its name
        return type(error).__name__


async def main() -> None:
    async with Runtime(name="program") as runtime:
        deadline_s = float(sys.argv[1]) if len(sys.argv) > 1 else None
        counters = [
            await runtime.spawn(Counter, placement=placement, deadline_s=deadline_s)
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


if __name__ == "__main__":
    asyncio.run(main())
