"""A plan says once what every update repeats: who waits for whom, and which values are kept."""

from collections.abc import AsyncIterator

import pytest

from vla_rl.graph import InvalidRun, Pipeline, UnknownResource
from vla_rl.graph.plan import Plan, Resource, make_plan


async def numbers() -> AsyncIterator[int]:
    yield 1


async def square(number: int) -> int:
    return number**2


async def total(numbers: list[int], squares: list[int]) -> int:
    return sum(numbers) + sum(squares)


def plan_of(keep: tuple[str, ...] = (), **capacities: int) -> Plan:
    graph = (
        Pipeline("sums", "sums of squares")
        .add_node("numbers", numbers, writes="numbers")
        .add_node("square", square, reads={"number": "numbers"}, writes="squares", stream=True)
        .add_node(
            "total",
            total,
            reads=("numbers", "squares"),
            writes="sum",
            resources={"device": 2, "disk": 1},
        )
        .build()
    )
    held = {name: Resource(name, capacity) for name, capacity in capacities.items()}
    return make_plan(graph, held, keep)


def test_a_node_waits_for_whole_values_and_takes_items_as_they_arrive() -> None:
    first, each, last = plan_of(device=2, disk=1).nodes
    assert (first.id, each.id, last.id) == ("numbers", "square", "total")
    assert (first.num_waits, each.num_waits, last.num_waits) == (0, 0, 2)
    assert first.stream_readers == (1,)
    assert each.item == "number"
    assert each.reads == ()
    assert last.reads == (("numbers", "numbers"), ("squares", "squares"))
    assert first.downstream == (1, 2)
    assert (first.collects, each.collects, last.collects) == (True, True, True)


def test_a_value_is_kept_if_nobody_reads_it_or_it_is_asked_for() -> None:
    plan = plan_of(device=2, disk=1)
    assert plan.kept == ("sum",)
    assert plan.num_readers == {"numbers": 1, "squares": 1}
    plan = plan_of(keep=("squares",), device=2, disk=1)
    assert plan.kept == ("sum", "squares")
    assert plan.num_readers == {"numbers": 1}


def test_resources_are_held_in_order_of_their_names() -> None:
    (*_, last) = plan_of(disk=1, device=3).nodes
    assert [(resource.name, units) for resource, units in last.resources] == [
        ("device", 2),
        ("disk", 1),
    ]


def test_what_the_executor_does_not_have_is_named() -> None:
    with pytest.raises(UnknownResource, match="node 'total' needs the resource 'disk'"):
        plan_of(device=2)
    with pytest.raises(UnknownResource, match="2 of the resource 'device', of which there are 1"):
        plan_of(device=1, disk=1)
    with pytest.raises(
        InvalidRun, match="keep names 'square', which no node of 'sums' writes; did"
    ):
        plan_of(keep=("square",), device=2, disk=1)
