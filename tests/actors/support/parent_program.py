"""A program with actors, to be killed or interrupted by a test: `parent_program.py FOLDER`."""

import asyncio
import signal
import sys
from pathlib import Path

import numpy as np
from sample_actors import Counter, WritesOnStop

from vla_rl.actors import ChildProcess, Runtime


async def main(folder: Path) -> None:
    async with Runtime(name="program") as runtime:
        counters = [await runtime.spawn(Counter, placement=ChildProcess()) for _ in range(2)]
        writer = await runtime.spawn(
            WritesOnStop, str(folder / "stopped"), placement=ChildProcess()
        )
        held = [await counter.echo_array(np.zeros(300_000, dtype=np.uint8)) for counter in counters]
        busy = asyncio.create_task(counters[0].block(3600))
        idle = asyncio.create_task(counters[1].wait_for_gate("for ever"))
        print(*(runtime.info(actor).pid for actor in (*counters, writer)), flush=True)
        try:
            await asyncio.gather(busy, idle)
        finally:
            print(len(held), flush=True)


if __name__ == "__main__":
    # who was started in the background by a shell ignores it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        asyncio.run(main(Path(sys.argv[1])))
    except KeyboardInterrupt:
        sys.exit(130)
