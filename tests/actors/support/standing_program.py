"""A program with actors whose processes a test stops: `standing_program.py`, and a line on stdin for each round of calls.

Prints the pids of all its processes once, then for each round how every actor answered: its pid, or the name of the error.
"""

import asyncio
import os
import sys

from sample_actors import Counter

from vla_rl.actors import ChildProcess, ForkServer, Runtime

FORKED = ChildProcess(fork_from=ForkServer(), frozen_after_s=1.0)
FRESH = ChildProcess(frozen_after_s=1.0)


async def answer_of(counter: Counter) -> str:
    try:
        return str(await counter.pid())
    except Exception as error:  # the test wants its name
        return type(error).__name__


async def main() -> None:
    async with Runtime(name="program") as runtime:
        counters = [await runtime.spawn(Counter, placement=placement) for placement in (FRESH, FORKED, FORKED)]
        print(os.getpid(), *(runtime.info(counter).pid for counter in counters), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(*(await asyncio.gather(*map(answer_of, counters))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
