"""The start time and memory of a simulator process: a new interpreter compared with a fork of a
prepared process.

    python -m benchmarks.process_start [--env Reacher-v5] [--processes 8] [--rounds 5]

Keys of the last line, fork over spawn, so that less is better:
    fork_vs_spawn_ready        time to start one more process and build its environment, with the
                               fork server running
    fork_vs_spawn_pool_ready   the same for a whole pool, with the start of the fork server
    fork_vs_spawn_private_mb   private memory of a process with its environment
and the figures themselves, `..._s` and `..._mb`.
"""

import argparse
import asyncio
import time
from typing import Literal

import uvloop

from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.types import EnvSpec

Start = Literal["fork", "spawn"]


async def started(
    runtime: Runtime, config: SimulatorConfig, env: EnvSpec, index: int
) -> SimulatorProcess:
    """Start one process and build its environment."""
    process = await SimulatorProcess.start_process(
        runtime, f"{config.start}-{index}", config, index, (env,)
    )
    await process.envs[0].build_env(env)
    return process


async def ready_s(start: Start, env: EnvSpec, num_processes: int) -> float:
    """Measure the seconds for one more process, over several started one after the other."""
    config = SimulatorConfig(start=start)
    async with Runtime(name="ready") as runtime:
        await SimulatorProcess.prepare(runtime, config, (env,))
        began = time.perf_counter()
        for index in range(num_processes):
            await started(runtime, config, env, index)
        return (time.perf_counter() - began) / num_processes


async def pool_ready_s(start: Start, env: EnvSpec, num_processes: int) -> float:
    """Measure the seconds until all processes of a pool, started together, are ready."""
    config = SimulatorConfig(start=start)
    async with Runtime(name="pool") as runtime:
        began = time.perf_counter()
        await asyncio.gather(
            *(started(runtime, config, env, index) for index in range(num_processes))
        )
        return time.perf_counter() - began


async def private_mb(start: Start, env: EnvSpec) -> float:
    """Measure the private MiB of one of two processes, after a reset."""
    config = SimulatorConfig(start=start)
    async with Runtime(name="memory") as runtime:
        processes = [await started(runtime, config, env, index) for index in range(2)]
        await processes[0].worker.reset(0, 0, None, 0)
        return processes[0].private_mb()


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="Reacher-v5", help="gymnasium id")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    env, num_processes = EnvSpec(id=options.env), options.processes
    measured = measure_in_turn(
        {
            "fork_ready_s": lambda: uvloop.run(ready_s("fork", env, num_processes)),
            "spawn_ready_s": lambda: uvloop.run(ready_s("spawn", env, num_processes)),
            "fork_pool_ready_s": lambda: uvloop.run(pool_ready_s("fork", env, num_processes)),
            "spawn_pool_ready_s": lambda: uvloop.run(pool_ready_s("spawn", env, num_processes)),
            "fork_private_mb": lambda: uvloop.run(private_mb("fork", env)),
            "spawn_private_mb": lambda: uvloop.run(private_mb("spawn", env)),
        },
        options.rounds,
    )
    ratios = {
        f"fork_vs_spawn_{what}": measured[f"fork_{what}{unit}"] / measured[f"spawn_{what}{unit}"]
        for what, unit in (("ready", "_s"), ("pool_ready", "_s"), ("private_mb", ""))
    }
    print_table(f"{num_processes} processes of {env.id}", {**measured, **ratios})
    print_json_line({**ratios, **measured})


if __name__ == "__main__":
    main()
