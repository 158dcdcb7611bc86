"""A program with forked actors, to be killed by a test; prints their pids, the server's last."""

import asyncio
import os

import numpy as np
from hooks import Heir
from sample_actors import Counter

from vla_rl.actors import ChildProcess, ForkServer, PrepareHook, Runtime

PLACEMENT = ChildProcess(
    fork_from=ForkServer(prepare=(PrepareHook("hooks:remember", {"word": "hello"}),))
)


async def main() -> None:
    async with Runtime(name="program") as runtime:
        counter = await runtime.spawn(Counter, placement=PLACEMENT)
        stuck = await runtime.spawn(Heir, placement=PLACEMENT)
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


if __name__ == "__main__":
    asyncio.run(main())
