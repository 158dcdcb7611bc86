"""A method's deadline is that of its name, of its class, or of its actor."""

import asyncio
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vla_rl.actors import Actor, actor_method
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.deadlines import DeadlineWatch, resolve_deadlines


class Sim(Actor):
    async def reset(self) -> None: ...

    @actor_method(deadline_s=5.0)
    async def step(self) -> None: ...


def deadlines(actors: float | None = None, **by_name: float) -> dict[str, float | None]:
    table = get_method_table(Sim)
    found = resolve_deadlines(table, actors, by_name)
    return dict(zip(table.by_name, found, strict=True))


def test_the_nearest_deadline_counts() -> None:
    assert deadlines() == {"reset": None, "step": 5.0}
    assert deadlines(9.0) == {"reset": 9.0, "step": 5.0}
    assert deadlines(9.0, step=1.0, reset=2.0) == {"reset": 2.0, "step": 1.0}


@pytest.mark.parametrize("wrong", [{"stop": 1.0}, {"step": 0.0}, {"step": -1.0}])
def test_a_deadline_of_no_method_or_of_no_time_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"deadline of \w+ is .* s, expected more than 0 s"):
        deadlines(**wrong)


def call(
    since: float, deadline_s: float | None = 10.0, *, concurrent: bool = False, waits: bool = False
) -> Any:
    """Return what the watch reads of a call."""
    return SimpleNamespace(
        since=since,
        deadline_s=deadline_s,
        concurrent=concurrent,
        expects_answer=not waits,
        waits_for_caller_of=lambda other: False,
    )


class Watched:
    """A watch over some calls, and the calls that it reported."""

    def __init__(self, *calls: Any) -> None:
        self.calls = dict(enumerate(calls))
        self.overdue: list[Any] = []
        self.reported = asyncio.Event()
        self.watch = DeadlineWatch(lambda: self.calls, lambda: None, self._on_overdue)

    def _on_overdue(self, late: Any) -> None:
        self.overdue.append(late)
        self.reported.set()

    async def checked(self) -> list[Any]:
        """Let the watch check now, and return what it reported."""
        self.watch.schedule_check(time.monotonic())
        async with asyncio.timeout(5):
            await self.reported.wait()
        self.watch.stop()
        return self.overdue


async def test_a_call_whose_deadline_has_passed_is_reported() -> None:
    late = call(time.monotonic() - 11.0)
    assert await Watched(late).checked() == [late]


async def test_a_call_that_waits_behind_another_has_its_time_before_it() -> None:
    now = time.monotonic()
    first, second = call(now, None), call(now - 11.0)
    late = call(now - 11.0, concurrent=True)
    assert await Watched(first, second, late).checked() == [late]


async def test_the_time_of_a_call_begins_with_the_last_answer() -> None:
    now = time.monotonic()
    watched = Watched(call(now - 11.0), late := call(now - 11.0, concurrent=True))
    watched.watch.answered_at = now
    assert await watched.checked() == [late]


async def test_a_stream_that_waits_for_its_consumer_is_not_late() -> None:
    now = time.monotonic()
    waits, late = call(now - 99.0, concurrent=True, waits=True), call(now - 11.0, concurrent=True)
    assert await Watched(waits, late).checked() == [late]


async def test_time_in_which_our_loop_stood_still_is_given_back_but_never_more() -> None:
    now = time.monotonic()
    old, young = call(now - 8.0), call(now - 1.0)
    watched = Watched(old, young)
    watched.watch.forgive(5.0)
    assert old.since == pytest.approx(now - 3.0)
    assert now <= young.since <= time.monotonic()


async def test_a_stopped_watch_looks_again_only_when_it_is_asked_to() -> None:
    watched = Watched(call(time.monotonic() - 11.0))
    watched.watch.schedule_check(time.monotonic())
    watched.watch.stop()
    assert watched.watch.next_look == math.inf
    assert len(await watched.checked()) == 1
