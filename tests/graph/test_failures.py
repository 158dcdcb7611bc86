"""A failing node is contained, named, tried again where that was asked for, and never hangs
anything.
"""

# ruff: noqa: PT012 - leaving the block is what is tested

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vla_rl.graph import (
    DROP,
    Executor,
    GraphError,
    NodeFailed,
    NodeOutput,
    NodeStatus,
    Pipeline,
    WrongInput,
    WrongOutput,
)


class Unlucky(RuntimeError):
    """What nodes raise here."""


async def fail() -> int:
    raise Unlucky("out of luck")


async def succeed() -> int:
    return 1


async def use(value: int) -> int:
    return value


async def failure_of(
    run_all: Any, pipeline: Pipeline, num_updates: int = 1, **options: Any
) -> NodeFailed:
    with pytest.raises(NodeFailed) as caught:
        await run_all(pipeline.build(), num_updates, **options)
    return caught.value


async def test_a_failing_node_names_itself_its_update_and_its_cause(run_all: Any) -> None:
    failure = await failure_of(run_all, Pipeline("p").add_node("bad", fail, writes="x"))
    assert (failure.node, failure.update) == ("bad", 0)
    assert str(failure) == "node 'bad' failed in update 0: Unlucky: out of luck"
    assert isinstance(failure.__cause__, Unlucky)
    assert isinstance(failure, GraphError)


async def exit_now() -> int:
    sys.exit(3)


async def test_a_node_that_exits_fails(run_all: Any) -> None:
    failure = await failure_of(run_all, Pipeline("p").add_node("bad", exit_now, writes="x"))
    assert "node 'bad' failed in update 0: RuntimeError: it raised SystemExit: 3" in str(failure)
    assert isinstance(failure.__cause__, RuntimeError)
    assert isinstance(failure.__cause__.__cause__, SystemExit)


async def exit_as_a_source() -> AsyncIterator[int]:
    yield 1
    sys.exit(3)


async def exit_at_an_item(item: int) -> int:
    sys.exit(item)


@pytest.mark.parametrize("where", ["source", "item"])
async def test_a_stream_s_node_that_exits_fails(run_all: Any, where: str) -> None:
    pipeline = Pipeline("p").add_node("bad", exit_as_a_source, writes="n")
    if where == "item":
        pipeline = (
            Pipeline("p")
            .add_node("good", numbers, writes="n")
            .add_node("bad", exit_at_an_item, reads={"item": "n"}, writes="x", stream=True)
        )
    failure = await failure_of(run_all, pipeline)
    assert "node 'bad' failed in update 0: RuntimeError: it raised SystemExit: 3" in str(failure)


async def numbers() -> AsyncIterator[int]:
    yield 3


async def refuse(value: int) -> None:
    raise WrongInput("value", f"it is {value}, expected 2")


async def test_a_value_that_its_reader_cannot_use_is_blamed_on_the_node_that_wrote_it(
    run_all: Any,
) -> None:
    pipeline = (
        Pipeline("p")
        .add_node("maker", succeed, writes="number")
        .add_node("reader", refuse, reads={"value": "number"})
    )
    failure = await failure_of(run_all, pipeline)
    assert isinstance(failure, WrongOutput)
    assert (failure.node, failure.__cause__) == ("maker", None)
    expected = (
        "node 'maker' wrote 'number' in update 0, which node 'reader' cannot use: it is 1, "
        "expected 2"
    )
    assert str(failure) == expected


async def test_a_value_from_outside_that_its_reader_cannot_use_is_blamed_on_no_other_node(
    run_all: Any,
) -> None:
    pipeline = Pipeline("p", inputs="update").add_node("reader", refuse, reads={"value": "update"})
    failure = await failure_of(run_all, pipeline)
    assert str(failure) == "node 'reader' cannot use 'update' in update 0: it is 0, expected 2"


async def test_dependents_are_skipped_and_everything_else_finishes(run_all: Any) -> None:
    may_end = asyncio.Event()

    async def slow() -> int:
        await may_end.wait()
        return 5

    async def fail_then_let_go() -> int:
        may_end.set()
        raise Unlucky

    pipeline = (
        Pipeline("p")
        .add_node("bad", fail_then_let_go, writes="x")
        .add_node("child", use, reads={"value": "x"}, writes="y")
        .add_node("grandchild", use, reads={"value": "y"}, writes="z")
        .add_node("after", succeed, deps="bad", writes="w")
        .add_node("slow", slow, writes="a")
        .add_node("follower", use, reads={"value": "a"}, writes="b")
    )
    failure = await failure_of(run_all, pipeline)
    assert failure.report is not None
    assert failure.report.statuses == {
        "bad": NodeStatus.FAILED,
        "child": NodeStatus.SKIPPED,
        "grandchild": NodeStatus.SKIPPED,
        "after": NodeStatus.SKIPPED,
        "slow": NodeStatus.COMPLETED,
        "follower": NodeStatus.COMPLETED,
    }
    assert failure.report.values == {"b": 5}


async def test_earlier_updates_arrive_before_the_failure_and_later_ones_are_cancelled() -> None:
    started: list[int] = []
    cancelled: list[int] = []
    fourth_lingers = asyncio.Event()

    async def begin(update: int) -> int:
        started.append(update)
        return update

    async def finish(x: int) -> int:
        if x == 2:
            await fourth_lingers.wait()
            raise Unlucky("in the third")
        return x

    async def linger(x: int) -> int:
        if x == 3:
            fourth_lingers.set()
        try:
            await asyncio.sleep(0 if x <= 2 else 3600)
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
        return x

    graph = (
        Pipeline("p", inputs="update")
        .add_node("begin", begin, reads="update", writes="x")
        .add_node("finish", finish, reads="x", writes="y")
        .add_node("linger", linger, reads="x", writes="z")
        .build()
    )
    received: list[int] = []
    with pytest.raises(NodeFailed, match="'finish' failed in update 2"):
        async with asyncio.timeout(20), Executor(graph, max_in_flight=3).run() as updates:
            async for update in updates:
                received.append(update.index)
    assert received == [0, 1]
    assert max(started) <= 4
    assert 3 in cancelled
    assert all(x > 2 for x in cancelled)


async def test_what_failed_in_a_later_update_is_told_with_the_first_failure() -> None:
    later_failed = asyncio.Event()

    async def quick(update: int) -> None:
        if update == 1:
            later_failed.set()
            raise Unlucky("in the second")

    async def slow(update: int) -> None:
        await later_failed.wait()
        raise Unlucky("in the first")

    graph = (
        Pipeline("p", inputs="update")
        .add_node("quick", quick, reads="update")
        .add_node("slow", slow, reads="update")
    )
    with pytest.raises(NodeFailed, match="'slow' failed in update 0") as caught:
        async with asyncio.timeout(20), Executor(graph.build(), max_in_flight=2).run() as updates:
            async for _ in updates:
                pass
    assert any("failed in update 1" in note for note in caught.value.__notes__)


async def test_a_failure_cancels_later_updates_at_once_even_while_the_body_works() -> None:
    hangs, may_fail, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def fails_in_update_1(update: int) -> None:
        if update == 1:
            await may_fail.wait()
            raise Unlucky

    async def hangs_in_update_2(update: int) -> None:
        if update == 2:
            hangs.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    pipeline = Pipeline("p", inputs="update").add_node("fails", fails_in_update_1, reads="update")
    graph = pipeline.add_node("hangs", hangs_in_update_2, reads="update").build()
    with pytest.raises(NodeFailed, match="'fails' failed in update 1"):
        async with asyncio.timeout(20), Executor(graph, max_in_flight=3).run() as updates:
            async for _ in updates:
                await hangs.wait()
                may_fail.set()
                await cancelled.wait()


async def test_a_failure_in_an_update_that_nobody_asks_for_any_more_is_still_raised() -> None:
    failed = asyncio.Event()

    async def work(update: int) -> None:
        if update == 1:
            failed.set()
            raise Unlucky

    graph = Pipeline("p", inputs="update").add_node("a", work, reads="update").build()
    with pytest.raises(NodeFailed, match="'a' failed in update 1"):
        async with asyncio.timeout(20), Executor(graph, max_in_flight=2).run() as updates:
            async for _ in updates:
                await failed.wait()
                await asyncio.sleep(0)
                break


async def test_the_bodys_own_error_wins_and_notes_the_nodes() -> None:
    failed = asyncio.Event()

    async def work(update: int) -> None:
        if update == 1:
            failed.set()
            raise Unlucky

    graph = Pipeline("p", inputs="update").add_node("a", work, reads="update").build()
    with pytest.raises(ZeroDivisionError) as caught:
        async with asyncio.timeout(20), Executor(graph, max_in_flight=2).run() as updates:
            async for _ in updates:
                await failed.wait()
                await asyncio.sleep(0)
                raise ZeroDivisionError
    assert caught.value.__notes__ == ["also, node 'a' failed in update 1: Unlucky: "]


async def test_a_second_failure_is_noted_on_the_first(run_all: Any) -> None:
    failure = await failure_of(
        run_all, Pipeline("p").add_node("one", fail, writes="x").add_node("two", fail, writes="y")
    )
    assert failure.node == "one"
    assert failure.__notes__ == ["also, node 'two' failed in update 0: Unlucky: out of luck"]


@pytest.mark.parametrize(("num_failures", "works"), [(0, True), (2, True), (3, False)])
async def test_a_node_is_tried_again_as_often_as_it_says(
    run_all: Any, num_failures: int, works: bool
) -> None:
    calls = 0

    async def unsteady() -> int:
        nonlocal calls
        calls += 1
        if calls <= num_failures:
            raise Unlucky
        return calls

    pipeline = Pipeline("p").add_node("a", unsteady, writes="x", retries=2, resources="device")
    if works:
        (update,) = await run_all(pipeline.build())
        assert (update.values["x"], update.spans["a"].attempts) == (
            num_failures + 1,
            num_failures + 1,
        )
    else:
        failure = await failure_of(run_all, pipeline)
        assert failure.report is not None
        assert (calls, failure.report.spans["a"].attempts) == (3, 3)


async def test_only_the_errors_that_were_named_are_tried_again(run_all: Any) -> None:
    calls = 0

    async def unsteady() -> int:
        nonlocal calls
        calls += 1
        raise Unlucky if calls == 1 else LookupError("not worth it")

    failure = await failure_of(
        run_all, Pipeline("p").add_node("a", unsteady, writes="x", retries=5, retry_on=(Unlucky,))
    )
    assert (calls, type(failure.__cause__)) == (2, LookupError)


async def test_a_node_that_cancels_itself_is_a_failure_not_a_hang(run_all: Any) -> None:
    async def cancels_itself() -> None:
        raise asyncio.CancelledError

    failure = await failure_of(run_all, Pipeline("p").add_node("a", cancels_itself))
    assert "CancelledError: its own code cancelled it" in str(failure)


async def test_the_executor_runs_again_after_a_failure(run_all: Any) -> None:
    calls = 0

    async def first_time_unlucky() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Unlucky
        return calls

    executor = Executor(
        Pipeline("p").add_node("a", first_time_unlucky, writes="x", resources="device").build()
    )
    async with asyncio.timeout(20):
        with pytest.raises(NodeFailed):
            async with executor.run(1) as updates:
                await anext(updates)
        async with executor.run(1) as updates:
            assert (await anext(updates)).values["x"] == 2
    assert executor.resources["device"].in_use == 0


WRONG: list[tuple[Any, tuple[str, ...], str]] = [
    (
        {"a": 1},
        ("a", "b"),
        r"returned the keys \['a'\]; it writes \['a', 'b'\]: expected exactly these: missing 'b'",
    ),
    ({"a": 1, "bb": 2}, ("a", "b"), "missing 'b', undeclared 'bb'; did you mean 'b'"),
    ({"a": 1, "b": 2, "c": 3}, ("a", "b"), "exactly these: undeclared 'c'"),
    (3, ("a", "b"), "returned int '3'"),
    (None, ("a", "b"), "returned None"),
    (None, ("a",), r"returned None; it writes \['a'\]: expected a value"),
    (3, (), r"returned int '3'; it writes \[\]: expected None"),
    (DROP, ("a",), "only a node with stream=True"),
    (NodeOutput(metrics={"m": 1}), ("a",), "a NodeOutput without batch"),
    (NodeOutput(batch=1, values={"a": 1}), ("a",), "both batch and values"),
    (NodeOutput(values={"b": 1}), ("a",), "missing 'a', undeclared 'b'"),
]


@pytest.mark.parametrize(("returned", "writes", "message"), WRONG)
async def test_a_node_that_returns_what_it_did_not_declare_is_told_so_once(
    run_all: Any, returned: Any, writes: tuple[str, ...], message: str
) -> None:
    calls = 0

    async def work() -> Any:
        nonlocal calls
        calls += 1
        return returned

    with pytest.raises(WrongOutput, match=r"^node 'work' in update 0 .*" + message) as caught:
        await run_all(Pipeline("p").add_node("work", work, writes=writes, retries=3).build())
    assert (caught.value.node, calls) == ("work", 1)


async def test_none_is_written_when_it_is_meant(run_all: Any) -> None:
    async def work() -> NodeOutput:
        return NodeOutput(values={"x": None})

    (update,) = await run_all(Pipeline("p").add_node("a", work, writes="x").build())
    assert update.values == {"x": None}
