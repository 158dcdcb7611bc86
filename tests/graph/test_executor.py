"""How nodes run: overlapping, sharing resources, in order, several updates at a time."""

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from vla_rl.graph import (
    Executor,
    Interval,
    InvalidRun,
    NodeOutput,
    NodeStatus,
    Pipeline,
    UnknownResource,
    Update,
    WrongOutput,
)
from vla_rl.graph.update import CriticalPath, Values


async def test_values_flow_by_name_from_writer_to_reader(run_all: Any) -> None:
    async def make(update: int, scale: int) -> dict[str, int]:
        return {"small": update, "large": scale * update}

    async def minus(large: int, small: int) -> int:
        return large - small

    graph = (
        Pipeline("p", inputs=("update", "scale"))
        .add_node("make", make, reads=("update", "scale"), writes=("small", "large"))
        .add_node("minus", minus, reads=("small", "large"), writes="difference")
        .build()
    )
    updates = await run_all(graph, 3, inputs={"scale": 10}, first=5)
    assert [update.index for update in updates] == [5, 6, 7]
    assert [update.values["difference"] for update in updates] == [45, 54, 63]


async def test_independent_nodes_overlap(run_all: Any) -> None:
    barrier = asyncio.Barrier(3)

    async def wait_at_barrier() -> None:
        await barrier.wait()  # passes only if all three are inside at the same time

    pipeline = Pipeline("p")
    for name in "abc":
        pipeline.add_node(name, wait_at_barrier)
    (update,) = await run_all(pipeline.build())
    assert set(update.statuses.values()) == {NodeStatus.COMPLETED}


async def test_a_node_begins_the_next_update_when_it_has_finished_this_one_and_its_inputs_are_there(
    run_all: Any,
) -> None:
    """With room for two updates, the first node of update 1 runs while the second node of update 0
    does.
    """
    barrier = asyncio.Barrier(2)
    log: list[str] = []

    async def first(update: int) -> int:
        log.append(f"first {update}")
        if update == 1:
            await barrier.wait()
        return update

    async def second(x: int) -> int:
        log.append(f"second {x}")
        if x == 0:
            await barrier.wait()
        return x

    graph = (
        Pipeline("p", inputs="update")
        .add_node("first", first, reads="update", writes="x")
        .add_node("second", second, reads="x", writes="y")
        .build()
    )
    updates = await run_all(graph, 2, max_in_flight=2)
    assert [update.values["y"] for update in updates] == [0, 1]
    assert log[:1] == ["first 0"]
    assert sorted(log[1:3]) == ["first 1", "second 0"]
    assert log[3:] == ["second 1"]


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
async def test_no_more_updates_are_in_flight_than_allowed(max_in_flight: int) -> None:
    began: list[int] = []
    ended: list[int] = []
    most = 0

    async def begin(update: int) -> int:
        nonlocal most
        began.append(update)
        most = max(most, len(began) - len(ended))
        await asyncio.sleep(0)
        return update

    async def finish(x: int) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    graph = (
        Pipeline("p", inputs="update")
        .add_node("begin", begin, reads="update", writes="x")
        .add_node("finish", finish, reads="x")
        .build()
    )
    async with asyncio.timeout(20), Executor(graph, max_in_flight=max_in_flight).run(8) as updates:
        async for update in updates:
            for _ in range(20):
                await asyncio.sleep(0)  # while the body works, the update it holds still counts
            ended.append(update.index)
    assert ended == list(range(8))
    assert most == max_in_flight


async def test_synchronous_updates_do_not_begin_before_the_loop_asks() -> None:
    began: list[int] = []

    async def begin(update: int) -> None:
        began.append(update)

    graph = Pipeline("p", inputs="update").add_node("a", begin, reads="update").build()
    async with asyncio.timeout(20), Executor(graph).run(3) as updates:
        async for update in updates:
            await asyncio.sleep(0)
            assert began[-1] == update.index


async def test_one_node_never_overlaps_itself_and_sees_updates_in_order(run_all: Any) -> None:
    inside: set[str] = set()
    seen: dict[str, list[int]] = {"a": [], "b": []}

    def make(name: str, pauses: int) -> Any:
        async def work(x: int) -> int:
            assert name not in inside
            inside.add(name)
            seen[name].append(x)
            for _ in range(pauses if x % 2 else 1):
                await asyncio.sleep(0)
            inside.remove(name)
            return x

        return work

    graph = (
        Pipeline("p", inputs="update")
        .add_node("a", make("a", 3), reads={"x": "update"}, writes="left")
        .add_node("b", make("b", 9), reads={"x": "update"}, writes="right")
        .build()
    )
    updates = await run_all(graph, 6, max_in_flight=4)
    assert [update.index for update in updates] == list(range(6))
    assert seen == {"a": list(range(6)), "b": list(range(6))}


async def test_a_run_without_an_end_goes_on_until_the_loop_is_left() -> None:
    async def work(update: int) -> int:
        return update

    graph = Pipeline("p", inputs="update").add_node("a", work, reads="update", writes="x").build()
    async with asyncio.timeout(20), Executor(graph, max_in_flight=2).run() as updates:
        async for update in updates:
            if update.index == 20:
                break
    assert update.values["x"] == 20


async def test_config_fills_the_remaining_parameters(run_all: Any) -> None:
    async def power(base: int, exponent: int, offset: int = 1) -> int:
        return base**exponent + offset  # type: ignore[no-any-return]

    graph = (
        Pipeline("p").add_node("a", power, writes="x", config={"base": 2, "exponent": 5}).build()
    )
    (update,) = await run_all(graph)
    assert update.values["x"] == 33


async def test_metrics_of_all_nodes_are_collected(run_all: Any) -> None:
    async def reward() -> NodeOutput:
        return NodeOutput(batch=[1.0, 0.0], metrics={"reward/mean": 0.5})

    async def learn(rewards: list[float]) -> NodeOutput:
        return NodeOutput(
            values={"loss": 0.1, "norm": 2.0}, metrics={"train/loss": 0.1, "train/norm": 2.0}
        )

    async def log(loss: float) -> NodeOutput:
        return NodeOutput(metrics={"log/lines": 1})

    graph = (
        Pipeline("p")
        .add_node("reward", reward, writes="rewards")
        .add_node("learn", learn, reads="rewards", writes=("loss", "norm"))
        .add_node("log", log, reads="loss")
        .build()
    )
    (update,) = await run_all(graph)
    assert update.metrics == {
        "reward/mean": 0.5,
        "train/loss": 0.1,
        "train/norm": 2.0,
        "log/lines": 1.0,
    }
    assert update.values == {"norm": 2.0}


async def test_two_nodes_may_not_report_one_metric(run_all: Any) -> None:
    async def report() -> NodeOutput:
        return NodeOutput(metrics={"loss": 1.0})

    graph = Pipeline("p").add_node("a", report).add_node("b", report, deps="a").build()
    with pytest.raises(WrongOutput, match="'a' and 'b' both report the metric 'loss'"):
        await run_all(graph)


async def test_a_metric_must_be_a_number(run_all: Any) -> None:
    async def report() -> NodeOutput:
        return NodeOutput(metrics={"loss": "low"})  # type: ignore[dict-item]

    with pytest.raises(
        WrongOutput, match="'a' reports 'low' as the metric 'loss', expected a number"
    ):
        await run_all(Pipeline("p").add_node("a", report).build())


async def test_a_value_is_let_go_after_its_last_reader_unless_it_is_kept(run_all: Any) -> None:
    alive = Counter[str]()

    class Big:
        def __init__(self, name: str) -> None:
            self.name = name
            alive[name] += 1

        def __del__(self) -> None:
            alive[self.name] -= 1

    async def make() -> dict[str, Big]:
        return {"images": Big("images"), "kept": Big("kept")}

    async def read(images: Big, kept: Big) -> int:
        return 1

    async def look(n: int) -> int:
        return alive["images"]

    graph = (
        Pipeline("p")
        .add_node("make", make, writes=("images", "kept"))
        .add_node("read", read, reads=("images", "kept"), writes="n")
        .add_node("look", look, reads="n", writes="num_alive")
        .build()
    )
    (update,) = await run_all(graph, keep="kept")
    assert update.values["num_alive"] == 0
    assert update.values["kept"].name == "kept"
    with pytest.raises(KeyError, match=r"'images' was not kept.*Executor\(keep="):
        update.values["images"]


async def test_what_runs_now_can_be_asked(until: Any) -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    graph = (
        Pipeline("p")
        .add_node("a", wait, resources="device")
        .add_node("b", wait, resources="device")
        .build()
    )
    async with asyncio.timeout(20), Executor(graph, clock=lambda: 7.0).run(1) as updates:
        await until(lambda: [node.status for node in updates.running] == ["running", "ready"])
        assert [(node.node, node.update, node.since_s) for node in updates.running] == [
            ("a", 0, 0.0),
            ("b", 0, None),
        ]


async def test_impossible_runs_are_refused() -> None:
    async def work(data: int) -> None: ...

    graph = (
        Pipeline("p", inputs="data")
        .add_node("a", work, reads="data", resources={"device": 2})
        .build()
    )
    with pytest.raises(
        UnknownResource, match="needs 2 of the resource 'device', of which there are 1"
    ):
        Executor(graph)
    executor = Executor(graph, resources={"device": 2})
    with pytest.raises(InvalidRun, match=r"needs the inputs \['data'\]"):
        executor.run(1)
    with pytest.raises(InvalidRun, match="'dat' is not an input of graph 'p'; did you mean 'data'"):
        executor.run(1, inputs={"dat": 1})
    with pytest.raises(InvalidRun, match="num_updates is -1"):
        executor.run(-1, inputs={"data": 1})
    with pytest.raises(InvalidRun, match="max_in_flight is 0"):
        Executor(graph, max_in_flight=0)
    with pytest.raises(InvalidRun, match="keep names 'x', which no node of 'p' writes"):
        Executor(graph, resources={"device": 2}, keep="x")
    other = (
        Pipeline("p").add_node("a", asyncio.sleep, config={"delay": 0}, resources="devise").build()
    )
    with pytest.raises(UnknownResource, match="did you mean 'device'"):
        Executor(other)


async def test_a_run_works_only_inside_its_block_and_only_once() -> None:
    graph = Pipeline("p").add_node("a", asyncio.sleep, config={"delay": 0}).build()
    run = Executor(graph).run(1)
    with pytest.raises(RuntimeError, match="async with"):
        await anext(run)
    async with run as updates:
        assert (await anext(updates)).index == 0
    with pytest.raises(RuntimeError, match="async with"):
        await anext(run)
    with pytest.raises(RuntimeError, match="already entered"):
        await run.__aenter__()


def test_a_value_that_was_freed_is_named_with_the_way_to_keep_it() -> None:
    with pytest.raises(KeyError, match=r"'groups' was not kept.*Executor\(keep=\('groups',\)\)"):
        Values(report=1)["groups"]


def test_an_update_lasts_from_its_admission_to_its_end() -> None:
    update = Update(
        index=3,
        values=Values(report=1),
        metrics={},
        spans={},
        started=10.0,
        ended=12.5,
        critical_path=CriticalPath(update=3, duration_s=2.5, segments=()),
    )
    assert update.duration_s == 2.5
    assert update.statuses == {}
    assert update.values["report"] == 1


def test_the_benchmark_ends_with_its_figures() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.graph_overhead",
        "--rounds",
        "1",
        "--updates",
        "20",
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=100, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {"overhead_us_per_node", "overlap_vs_longest", "overlap_vs_sum"} <= figures.keys()


async def test_a_long_run_does_not_remember_its_past() -> None:
    async def work(update: int) -> int:
        return update

    graph = Pipeline("p", inputs="update").add_node("a", work, reads="update", writes="x").build()

    def num_intervals() -> int:
        gc.collect()
        return sum(type(each) is Interval for each in gc.get_objects())

    before = num_intervals()
    async with asyncio.timeout(20), Executor(graph, max_in_flight=3).run(50) as updates:
        async for update in updates:
            (interval,) = update.spans["a"].intervals
            assert sum(1 for _ in interval.chain()) <= 4
            if update.index == 40:
                assert num_intervals() - before <= 10
