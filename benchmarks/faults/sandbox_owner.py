"""A process that owns a sandbox and keeps it busy: functions, programs, children, files. A target
of the campaign.

    python -m benchmarks.faults.sandbox_owner --seed 3

Prints `answered <how>` for every call that returns, with any outcome.
"""

import argparse
import asyncio
import random
import time

from vla_rl.sandbox import ProcessLimits, Sandbox

_PROGRAMS = (
    "print(sum(range(1000)))",
    "import time\ntime.sleep(0.5)",
    "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(60)'])",
    "open('notes.txt', 'w').write('x' * 1000)\nwhile True: pass",
)


def nap(seconds: float) -> float:
    """Sleep in a process of the sandbox."""
    time.sleep(seconds)
    return seconds


async def keep_busy(seed: int, calls: int | None) -> None:
    """Make calls, four at a time, until `calls` have returned."""
    dice, answered = random.Random(seed), 0

    async def one(sandbox: Sandbox) -> None:
        nonlocal answered
        while calls is None or answered < calls:
            limits = ProcessLimits(timeout_s=1.0, network=False)
            if dice.random() < 0.5:
                path = "benchmarks.faults.sandbox_owner:nap"
                result = await sandbox.call(path, {"seconds": dice.uniform(0.0, 0.4)}, limits)
            else:
                result = await sandbox.run_program(dice.choice(_PROGRAMS), limits=limits)
            answered += 1
            print(f"answered {result.fault or 'done'}", flush=True)

    async with Sandbox() as sandbox, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(one(sandbox))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=None, help="calls to make; without it, no end")
    asked = parser.parse_args()
    asyncio.run(keep_busy(asked.seed, asked.calls))


if __name__ == "__main__":
    main()
