"""Answers: which call a message ends, and messages that nobody waits for."""

import asyncio
import builtins
import itertools
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sample_actors import Counter

import vla_rl.errors
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.exchange import Answers
from vla_rl.actors.calls.pending import (
    ActorLifecycle,
    ActorState,
    Mailbox,
    PendingCall,
    PendingStream,
)
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import OWN_CALL, Kind, MalformedMessage
from vla_rl.errors import ActorDied, ActorFrozen, RemoteError

ADD = get_method_table(Counter).by_name["add"]


class Waiting:
    """Calls that wait, and the answers that they get."""

    def __init__(self) -> None:
        self.codec, self.cancelled, self.answered = Codec(), list[int](), list[PendingCall]()
        self.calls: dict[int, PendingCall] = {}
        self.questions: dict[int, PendingCall] = {}
        self.mailbox = Mailbox(2)
        deadlines: Any = SimpleNamespace(record_answer=self.answered.append)
        self.answers = Answers(
            "counter", self.calls, self.questions, self.mailbox, deadlines, self.cancelled.append
        )
        channel: Any = SimpleNamespace(codec=self.codec, pid=5)
        self.answers.set_channel(channel)

    def ask(self, call: int, kind: type[PendingCall] = PendingCall, result: Any = int) -> Any:
        assert self.mailbox.try_take_slot()
        loop = asyncio.get_running_loop()
        self.calls[call] = kind(loop, ADD, self.codec.get_decoder(result), None)
        return self.calls[call]

    def answer(self, kind: Kind, call: int, value: Any = None) -> None:
        frames = self.codec.encode(kind, 0, 0, call, value, "test")
        self.answers.on_message([bytes(frame) for frame in frames])


async def test_an_answer_ends_its_own_call_and_frees_its_place() -> None:
    waiting = Waiting()
    first, second = waiting.ask(1), waiting.ask(2)
    assert not waiting.mailbox.try_take_slot()
    waiting.answer(Kind.RESULT, 2, 40)
    assert second.future.result() == 40
    assert not first.future.done()
    assert (list(waiting.calls), waiting.answered) == ([1], [second])
    assert waiting.mailbox.try_take_slot()


async def test_a_result_of_another_type_than_declared_fails_the_call() -> None:
    waiting = Waiting()
    pending = waiting.ask(1)
    waiting.answer(Kind.RESULT, 1, "forty")
    with pytest.raises(TypeError, match="add returned another type than it declares"):
        pending.future.result()


async def test_a_call_that_the_actor_cancels_by_itself_fails_as_by_its_death() -> None:
    waiting = Waiting()
    pending = waiting.ask(1)
    waiting.answer(Kind.CANCELLED, 1)
    with pytest.raises(ActorDied, match="stopped while this call was running"):
        pending.future.result()


async def test_an_answer_of_a_kind_that_no_call_has_fails_it_and_is_counted() -> None:
    waiting = Waiting()
    pending = waiting.ask(1)
    waiting.answer(Kind.READY, 1)
    with pytest.raises(Exception, match="answer of kind"):
        pending.future.result()
    assert waiting.answers.num_rejected == 1


async def test_items_are_taken_as_far_as_they_were_granted() -> None:
    waiting = Waiting()
    stream = waiting.ask(1, PendingStream)
    stream.num_granted = 1
    waiting.answer(Kind.ITEM, 1, 3)
    waiting.answer(Kind.ITEM, 1, 4)
    assert (list(stream.items), stream.num_granted) == ([3], 0)
    assert waiting.answers.num_rejected == 1
    waiting.answer(Kind.END, 1)
    assert stream.future.result() is None


async def test_an_item_of_another_type_fails_the_stream_and_stops_it_at_the_actor() -> None:
    waiting = Waiting()
    stream = waiting.ask(1, PendingStream)
    stream.num_granted = 2
    waiting.answer(Kind.ITEM, 1, "three")
    assert waiting.cancelled == [1]
    with pytest.raises(TypeError, match="add yielded another type"):
        stream.future.result()
    waiting.answer(Kind.ITEM, 1, 4)  # sent before the actor knew
    assert not stream.items
    assert waiting.answers.num_rejected == 0


async def test_answers_to_nobody_and_of_an_ended_incarnation_are_counted() -> None:
    waiting = Waiting()
    waiting.answer(Kind.RESULT, 9, 1)
    pending = waiting.ask(1)
    waiting.answers.clear_channel()
    waiting.answer(Kind.RESULT, 1, 1)
    assert waiting.answers.num_rejected == 2
    assert not pending.future.done()


async def test_a_lag_report_takes_no_place_and_a_failed_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waiting = Waiting()
    question = waiting.ask(3)
    waiting.questions[3] = waiting.calls.pop(3)
    waiting.answer(Kind.RESULT, 3, 8)
    assert question.future.result() == 8
    assert not waiting.answered
    assert waiting.questions == {}
    waiting.answer(Kind.ERROR, OWN_CALL, ["builtins", "ValueError", "x", ["x"], {}, "trace"])
    assert "failed while it ended" in caplog.text
    assert waiting.answers.num_rejected == 0


async def test_the_arrays_of_an_answer_that_nobody_waits_for_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, discarded = Waiting(), list[object]()
    monkeypatch.setattr(waiting.codec, "discard", discarded.append)
    waiting.ask(1).future.cancel()
    waiting.answer(Kind.RESULT, 1, 8)
    assert len(discarded) == 1
    assert waiting.mailbox.try_take_slot()


# ---- reports that another process has written


CLASSES = [
    *(("builtins", name) for name in dir(builtins)),
    *(("vla_rl.errors", name) for name in dir(vla_rl.errors)),
    *(("builtins", "no_such"), ("os", "system"), ("", "")),
]
ARGUMENTS: list[list[Any]] = [
    *([], ["x"], [None], [["x"], {"a": [1]}], [1, 2, 3, 4, 5]),
    ["x", ["file", "line", b"offset", 4]],  # a SyntaxError that cannot be printed
    ["x", ["no error"]],  # an ExceptionGroup of texts
]
ATTRIBUTES: list[dict[str, Any]] = [
    {},
    *({name: 3} for name in ("__notes__", "__class__", "__dict__", "__cause__", "__traceback__")),
    *({name: [3]} for name in ("args", "with_traceback", "add_note", "exceptions", "filename")),
    {"own": [1, 2], "": None, "not a name": {}},
]
REPORTS = [
    [module, name, "words", args, attributes, "trace"]
    for (module, name), args, attributes in itertools.product(CLASSES, ARGUMENTS, ATTRIBUTES)
]


async def test_a_call_ends_whatever_its_error_report_holds() -> None:
    waiting = Waiting()
    for call, report in enumerate(random.Random(11).sample(REPORTS, 600), start=1):
        pending = waiting.ask(call)
        waiting.answer(Kind.ERROR, call, report)
        error = pending.future.exception()
        assert isinstance(error, Exception), report
        assert "Remote traceback of actor 'counter' (pid 5)" in error.__notes__[0], report
        assert isinstance(str(error), str), report
        assert not waiting.calls, report
    assert waiting.mailbox.try_take_slot()
    assert len(waiting.answered) == 600


@pytest.mark.parametrize(
    ("report", "kind", "words"),
    [
        (
            ["builtins", "StopIteration", "no more", [], {}, ""],
            RemoteError,
            "StopIteration: no more",
        ),
        (["builtins", "ValueError", "bad", ["bad"], {"__notes__": 3}, ""], ValueError, "bad"),
        (["builtins", "ValueError", "bad", ["bad"], {"args": 3, "own": 1}, ""], ValueError, "bad"),
        (
            ["builtins", "OSError", "no room", [28, "no room"], {}, ""],
            OSError,
            "[Errno 28] no room",
        ),
        (["vla_rl.errors", "ActorDied", "d", ["d"], {"__class__": 3}, ""], ActorDied, "d"),
        (["builtins", "UnicodeDecodeError", "bad byte", [], {}, ""], RemoteError, "bad byte"),
    ],
)
async def test_an_error_keeps_its_class_as_far_as_its_report_allows(
    report: list[Any], kind: type[Exception], words: str
) -> None:
    waiting = Waiting()
    pending = waiting.ask(1)
    waiting.answer(Kind.ERROR, 1, report)
    error = pending.future.exception()
    assert type(error) is kind
    assert words in str(error)


@pytest.mark.parametrize("report", [3, [], ["builtins", "ValueError"], [1, 2, 3, 4, 5, 6]], ids=str)
async def test_a_report_of_another_form_ends_its_call(report: Any) -> None:
    waiting = Waiting()
    pending = waiting.ask(1)
    waiting.answer(Kind.ERROR, 1, report)
    assert isinstance(pending.future.exception(), TypeError)
    assert not waiting.calls


class Picky(msgspec.Struct):
    """A result whose own check raises another error than msgspec expects."""

    number: int

    def __post_init__(self) -> None:
        raise LookupError(f"no {self.number}")


async def test_a_result_whose_own_check_fails_ends_its_call() -> None:
    waiting = Waiting()
    pending = waiting.ask(1, result=Picky)
    waiting.answer(Kind.RESULT, 1, {"number": 3})
    with pytest.raises(MalformedMessage, match="LookupError: no 3"):
        pending.future.result()
    assert (waiting.calls, waiting.answers.num_rejected) == ({}, 1)


async def test_an_item_that_cannot_be_read_fails_its_stream_and_stops_it_at_the_actor() -> None:
    waiting = Waiting()
    stream = waiting.ask(1, PendingStream, result=Picky)
    stream.num_granted = 1
    waiting.answer(Kind.ITEM, 1, {"number": 3})
    assert (waiting.cancelled, waiting.answers.num_rejected) == ([1], 1)
    with pytest.raises(MalformedMessage, match="LookupError: no 3"):
        stream.future.result()


def frozen() -> ActorFrozen:
    return ActorFrozen("env-1", 7, "step did not answer within 2 s", ("last words",))


async def test_callers_wait_while_an_actor_restarts_and_go_on_with_the_next_incarnation() -> None:
    lifecycle = ActorLifecycle("env-1")
    lifecycle.enter_state(ActorState.RUNNING, None)
    await lifecycle.until_running()
    lifecycle.enter_state(ActorState.RESTARTING, frozen())
    waiting = asyncio.create_task(lifecycle.until_running())
    await asyncio.sleep(0)
    assert not waiting.done()
    lifecycle.enter_state(ActorState.RUNNING, None)
    async with asyncio.timeout(5):
        await waiting


async def test_callers_that_wait_get_the_error_if_no_incarnation_comes() -> None:
    lifecycle = ActorLifecycle("env-1")
    lifecycle.enter_state(ActorState.RESTARTING, frozen())
    waiting = asyncio.create_task(lifecycle.until_running())
    await asyncio.sleep(0)
    lifecycle.enter_state(ActorState.DEAD, frozen())
    async with asyncio.timeout(5):
        with pytest.raises(ActorFrozen, match="did not answer within 2 s"):
            await waiting


async def test_each_caller_gets_an_error_of_its_own_with_pid_and_last_words() -> None:
    lifecycle = ActorLifecycle("env-1")
    lifecycle.enter_state(ActorState.DEAD, frozen())
    first, second = lifecycle.make_exit_error(), lifecycle.make_exit_error()
    assert first is not second
    assert (type(first), first.pid, first.stderr_tail) == (ActorFrozen, 7, ("last words",))


async def test_an_actor_that_never_ran_is_reported_with_its_state() -> None:
    with pytest.raises(ActorDied, match="it is starting"):
        await ActorLifecycle("env-1").until_running()


async def test_the_last_error_says_why_no_incarnation_follows() -> None:
    lifecycle = ActorLifecycle("env-1")
    lifecycle.enter_state(ActorState.DEAD, frozen())
    assert lifecycle.make_final_error("too often", None).cause.endswith("within 2 s; too often")
    failed = lifecycle.make_final_error("too often", ValueError("no room"))
    assert failed.cause.endswith("; too often; the last restart failed: no room")
    assert isinstance(failed, ActorFrozen)


async def test_senders_get_places_in_the_order_of_asking() -> None:
    mailbox, order = Mailbox(1), []
    await mailbox.take_slot()

    async def send(name: str) -> None:
        await mailbox.take_slot()
        order.append(name)
        mailbox.free_slot()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(send(name))
        await asyncio.sleep(0)
        assert mailbox.num_waiting == 3
        mailbox.free_slot()
    assert order == ["a", "b", "c"]


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    mailbox = Mailbox(1)
    await mailbox.take_slot()
    waiter = asyncio.create_task(mailbox.take_slot())
    await asyncio.sleep(0)
    mailbox.free_slot()
    assert mailbox.try_take_slot() is False
    await waiter


async def test_a_sender_that_gives_up_passes_its_place_on() -> None:
    mailbox = Mailbox(1)
    await mailbox.take_slot()
    first, second = (
        asyncio.create_task(mailbox.take_slot()),
        asyncio.create_task(mailbox.take_slot()),
    )
    await asyncio.sleep(0)
    mailbox.free_slot()  # the place goes to the first, which is cancelled before it can take it
    first.cancel()
    async with asyncio.timeout(5):
        await second
    assert first.cancelled()
    assert mailbox.try_take_slot() is False
    mailbox.free_slot()
    assert mailbox.try_take_slot() is True


def test_a_mailbox_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="mailbox is 0, expected at least 1"):
        Mailbox(0)


async def test_a_sender_that_was_cancelled_and_then_passed_over_is_cancelled_and_nothing_else() -> (
    None
):
    mailbox = Mailbox(1)
    await mailbox.take_slot()
    waiter = asyncio.create_task(mailbox.take_slot())
    await asyncio.sleep(0)
    waiter.cancel()
    mailbox.free_slot()  # finds nobody else who waits
    async with asyncio.timeout(5):
        await asyncio.wait([waiter])
    assert waiter.cancelled()
    assert mailbox.try_take_slot() is True
