"""The executor's overhead over awaiting the same functions directly, and the overlap of independent
nodes.

    python -m benchmarks.graph_overhead

Keys of the last line:
    overhead_us_per_node   processor time of the executor minus that of bare awaits, per node, on a
                           graph of eight nodes shaped like SRPO whose functions do nothing; goal <
                           50
    overlap_vs_longest     wall-clock of eight independent nodes over that of the longest of them;
                           goal < 1.05
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

import uvloop

from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from vla_rl.graph import Executor, Pipeline, TaskGraph

SLEEPS_S = (0.05, 0.08, 0.1, 0.12, 0.15, 0.18, 0.2, 0.25)


async def source(update: int) -> int:
    """Return a value without inputs.

    Yields to the loop once, like every function that really waits.
    """
    await asyncio.sleep(0)
    return update


async def one(a: int) -> int:
    """Return a value computed from one input."""
    await asyncio.sleep(0)
    return a + 1


async def two(a: int, b: int) -> int:
    """Return a value computed from two inputs."""
    await asyncio.sleep(0)
    return a + b


def srpo_shaped() -> TaskGraph:
    """Build rollout -> reward -> advantage -> update, with three more inferences that do not depend
    on each other.
    """
    return (
        Pipeline("overhead", inputs="update")
        .add_node("rollout", source, reads="update", writes="groups")
        .add_node("reward", one, reads={"a": "groups"}, writes="rewards")
        .add_node("log_prob", one, reads={"a": "groups"}, writes="log_probs", resources="device")
        .add_node(
            "reference",
            one,
            reads={"a": "groups"},
            writes="reference_log_probs",
            resources="device",
        )
        .add_node("value", one, reads={"a": "groups"}, writes="values", resources="device")
        .add_node("advantage", two, reads={"a": "rewards", "b": "values"}, writes="advantages")
        .add_node(
            "batch", two, reads={"a": "log_probs", "b": "reference_log_probs"}, writes="batch"
        )
        .add_node(
            "update",
            two,
            reads={"a": "advantages", "b": "batch"},
            writes="metrics",
            resources="device",
        )
        .build()
    )


async def by_hand(num_updates: int) -> None:
    """Await the same eight calls one after another."""
    for update in range(num_updates):
        groups = await source(update)
        rewards, log_probs, reference, values = (
            await one(groups),
            await one(groups),
            await one(groups),
            await one(groups),
        )
        advantages, batch = await two(rewards, values), await two(log_probs, reference)
        await two(advantages, batch)


async def by_executor(graph: TaskGraph, num_updates: int) -> None:
    """Run the same calls as nodes."""
    async with Executor(graph).run(num_updates) as updates:
        async for _ in updates:
            pass


def sleepers() -> TaskGraph:
    """Build nodes that only sleep, for different times."""

    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)

    pipeline = Pipeline("sleepers")
    for number, seconds in enumerate(SLEEPS_S):
        pipeline.add_node(f"sleeper_{number}", sleep, config={"seconds": seconds})
    return pipeline.build()


def seconds_of(work: Callable[[], Awaitable[None]], clock: Callable[[], float]) -> float:
    """Measure the seconds of `work` on a new loop, by this clock, without the start of the loop."""

    async def timed() -> float:
        started = clock()
        await work()
        return clock() - started

    return uvloop.run(timed())


def main() -> None:
    """Measure, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=1000)
    options = parser.parse_args()
    graph, independent = srpo_shaped(), sleepers()
    seconds = measure_in_turn(
        {
            "by hand": lambda: seconds_of(lambda: by_hand(options.updates), time.process_time),
            "executor": lambda: seconds_of(
                lambda: by_executor(graph, options.updates), time.process_time
            ),
            "longest alone": lambda: seconds_of(
                lambda: asyncio.sleep(max(SLEEPS_S)), time.perf_counter
            ),
            "all overlapped": lambda: seconds_of(
                lambda: by_executor(independent, 1), time.perf_counter
            ),
        },
        options.rounds,
    )
    num_nodes = options.updates * len(graph.nodes)
    figures = {
        "overhead_us_per_node": 1e6 * (seconds["executor"] - seconds["by hand"]) / num_nodes,
        "by_hand_us_per_node": 1e6 * seconds["by hand"] / num_nodes,
        "overlap_vs_longest": seconds["all overlapped"] / seconds["longest alone"],
        "overlap_vs_sum": seconds["all overlapped"] / sum(SLEEPS_S),
    }
    print_table("the graph's executor", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
