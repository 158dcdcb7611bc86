"""The rules of an actor, the same in this loop, in a child process and on another host."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

SUPPORT = Path(__file__).parents[1] / "actors" / "support"
sys.path.insert(0, str(SUPPORT))

from durations import at_some_pace  # noqa: E402
from sample_actors import (  # noqa: E402
    Counter,
    CrashLoop,
    FailsToStart,
    FailsToStop,
    Labelled,
    Point,
    Slow,
    Streamer,
    WritesOnStop,
)

from vla_rl.actors import (  # noqa: E402
    ChildProcess,
    ForkServer,
    InLoop,
    Placement,
    RemoteHost,
    RestartPolicy,
    Runtime,
    call_all,
    call_any,
    call_as_completed,
    list_waits,
    make_keys,
    read_keys,
    read_public_key,
    tell,
)
from vla_rl.errors import ActorDied, ActorFrozen, RemoteError  # noqa: E402

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]

FORKED = ChildProcess(fork_from=ForkServer(imports=("sample_actors",)))


@pytest.fixture(scope="module")
def remote_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteHost]:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder / "keys")
    keys = folder / "keys"
    command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", "tcp://127.0.0.1:0"]
    command += [
        "--keys",
        str(keys / "server.key"),
        "--allow",
        str(keys / "client.pub"),
        "--lost-after",
        "30",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        yield RemoteHost(
            address=address,
            server_public_key=read_public_key(keys / "server.pub"),
            client_keys=read_keys(keys / "client.key"),
            lost_after_s=30.0,
            # most tests start several; tests/actors/test_lost_host.py has actors that are not forked
            process=FORKED,
        )
        server.terminate()
        assert server.wait(timeout=20) == 0


OF_SPAWNED_PROCESSES = {
    "test_a_call_runs_on_the_state_that_the_constructor_made",
    "test_arrays_travel_in_any_nesting",
    "test_a_builtin_error_arrives_as_its_class_with_the_remote_traceback",
    "test_a_frozen_actor_is_replaced_within_its_policy",
    "test_a_stream_gives_every_item_in_order",
    "test_a_constructor_that_raises_raises_in_spawn",
    "test_an_actor_that_does_not_start_in_time_is_given_up",
    "test_a_stopped_actor_finishes_its_calls_and_runs_on_stop",
    "test_an_on_stop_that_raises_is_an_error_in_the_log_and_the_actor_ends_all_the_same",
    "test_a_killed_actor_fails_its_calls_and_does_not_run_on_stop",
    "test_an_actor_that_keeps_dying_ends_the_runtime",
}
"""Tests of the suite with processes that are spawned: one of each kind of message, and all beginnings
and ends. Each process is a new interpreter; once it runs, it does what a forked one does."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "placement" in metafunc.fixturenames:
        marks = () if metafunc.function.__name__ in OF_SPAWNED_PROCESSES else pytest.mark.proof
        spawned = pytest.param("child_process", marks=marks)
        hosts = ["in_loop", spawned, "fork_server", "remote_host"]
        metafunc.parametrize("placement", hosts, indirect=True)


@pytest.fixture
def placement(request: pytest.FixtureRequest) -> Placement:
    if request.param == "in_loop":
        return InLoop()
    if request.param == "child_process":
        return ChildProcess()
    if request.param == "fork_server":
        return FORKED
    host: RemoteHost = request.getfixturevalue("remote_host")
    return host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_runtime(remote_host: RemoteHost) -> AsyncIterator[Runtime]:
    """One for all tests: its fork server imports the actors once, and `remote_host` outlives it."""
    async with Runtime(name="contract", stop_grace_s=30.0) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def runtime(shared_runtime: Runtime) -> AsyncIterator[Runtime]:
    yield shared_runtime
    await shared_runtime._stop_all()


@pytest_asyncio.fixture(loop_scope="module")
async def counter(runtime: Runtime, placement: Placement) -> Counter:
    return await runtime.spawn(Counter, 3, name="counter", placement=placement)


# ---- calls


async def test_a_call_runs_on_the_state_that_the_constructor_made(counter: Counter) -> None:
    assert await counter.add(2) == 5
    assert await counter.total() == 5


async def test_defaults_and_keywords_work_as_in_any_call(counter: Counter) -> None:
    assert await counter.scaled(5) == 10
    assert await counter.scaled(5, by=3) == 15
    assert await counter.scaled(n=5, by=4) == 20


async def test_a_wrong_number_of_arguments_is_refused_before_anything_is_sent(
    counter: Counter,
) -> None:
    with pytest.raises(TypeError, match=r"Counter\.add.*too many positional arguments"):
        await counter.add(1, 2)  # type: ignore[call-arg]
    assert await counter.seen() == []


async def test_an_argument_of_another_type_is_refused_by_name(counter: Counter) -> None:
    with pytest.raises(
        TypeError, match=r"Counter\.add got wrong argument types.*Expected `int`, got `str`"
    ):
        await counter.add("two")  # type: ignore[arg-type]
    assert await counter.add(1) == 4


async def test_a_value_that_no_message_can_hold_is_refused_at_the_sender(counter: Counter) -> None:
    with pytest.raises(
        TypeError, match=r"counter\.echo: a value of type builtins\.object cannot be sent"
    ):
        await counter.echo([object()])
    assert await counter.total() == 3


async def test_a_result_that_no_message_can_hold_is_a_type_error_at_the_caller(
    counter: Counter,
) -> None:
    with pytest.raises(TypeError, match=r"Counter\.returns_unsendable.*cannot be sent"):
        await counter.returns_unsendable()
    assert await counter.total() == 3


async def test_a_result_of_another_type_than_declared_is_a_type_error_at_the_caller(
    counter: Counter,
) -> None:
    with pytest.raises(
        TypeError, match=r"promises_int returned another type than it declares: Expected `int`"
    ):
        await counter.promises_int()


async def test_structs_arrive_as_their_own_class(counter: Counter) -> None:
    assert await counter.move(Point(1, 2), 3) == Point(4, 2)


async def test_calls_of_one_caller_run_in_the_order_in_which_they_were_made(
    counter: Counter,
) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(200):
            group.create_task(counter.add(number))
    assert await counter.seen() == list(range(200))


async def test_one_call_runs_at_a_time(counter: Counter) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(counter.slow_add(number))
    assert await counter.most_running() == 1
    assert await counter.seen() == list(range(10))


async def test_a_concurrent_endpoint_runs_beside_a_call_that_waits(counter: Counter) -> None:
    first = asyncio.create_task(counter.wait_for_gate("first"))
    second = asyncio.create_task(counter.wait_concurrently("second"))
    await asyncio.sleep(0)
    await counter.open_gate()
    assert await asyncio.gather(first, second) == ["first", "second"]


async def test_an_unknown_method_of_a_handle_says_what_would_be_one(counter: Counter) -> None:
    with pytest.raises(AttributeError, match="Counter has no method 'subtract'"):
        counter.subtract  # type: ignore[attr-defined]  # noqa: B018


# ---- arrays


async def test_arrays_arrive_equal_and_read_only(counter: Counter) -> None:
    for shape in [(), (0, 3), (7,), (64, 64), (224, 224, 3)]:
        for dtype in ["uint8", "float32", "int64", "bool"]:
            values = (np.arange(np.prod(shape)) % 2).astype(dtype).reshape(shape)
            answer = await counter.echo_array(values)
            assert answer.dtype == values.dtype
            assert answer.shape == shape
            assert np.array_equal(answer, values)
            assert not answer.flags.writeable


async def test_arrays_travel_in_any_nesting(counter: Counter) -> None:
    image = np.arange(100_000, dtype=np.uint8)
    value = {
        "images": [image, image[:50_000]],
        "state": {"pose": np.float32([1, 2])},
        "text": "pick it up",
    }
    answer = await counter.echo(value)
    assert np.array_equal(answer["images"][0], image)
    assert np.array_equal(answer["images"][1], image[:50_000])
    assert answer["state"]["pose"].tolist() == [1.0, 2.0]
    assert answer["text"] == "pick it up"


async def test_arrays_travel_in_structs(counter: Counter) -> None:
    answer = await counter.echo_labelled([Labelled("a", np.ones(3)), Labelled("b", np.zeros(9000))])
    assert [item.label for item in answer] == ["a", "b"]
    assert answer[0].values.tolist() == [1.0, 1.0, 1.0]
    assert answer[1].values.shape == (9000,)


async def test_arrays_that_are_not_contiguous_arrive_equal(counter: Counter) -> None:
    values = np.arange(90_000, dtype=np.int32).reshape(300, 300)[::3, ::-1].T
    assert np.array_equal(await counter.echo_array(values), values)


async def test_an_array_that_was_sent_can_be_written_again_at_once(counter: Counter) -> None:
    values = np.zeros(50_000, dtype=np.uint8)
    call = asyncio.create_task(counter.echo_array(values))
    await asyncio.sleep(0)
    values[:] = 9
    assert int((await call).max()) == 0


async def test_the_actor_cannot_write_into_an_array_that_it_was_sent(counter: Counter) -> None:
    with pytest.raises(ValueError, match="read-only"):
        await counter.write_into(np.zeros(50_000))


async def test_numpy_scalars_arrive_as_numbers(counter: Counter) -> None:
    assert await counter.describe(np.float32(1.5)) == "float"
    assert await counter.add(np.int64(2)) == 5  # type: ignore[arg-type]


async def test_an_array_of_objects_is_refused(counter: Counter) -> None:
    with pytest.raises(TypeError, match=r"dtype object cannot be sent"):
        await counter.echo(np.array([object()]))


# ---- errors of the actor's own code


async def test_a_builtin_error_arrives_as_its_class_with_the_remote_traceback(
    counter: Counter,
) -> None:
    with pytest.raises(ValueError, match="too hot") as raised:
        await counter.raise_value_error("too hot")
    assert "in raise_value_error" in raised.value.__notes__[0]
    assert await counter.total() == 3


async def test_an_error_of_an_unknown_class_arrives_as_a_remote_error(counter: Counter) -> None:
    with pytest.raises(RemoteError, match="OwnError: mine") as raised:
        await counter.raise_own_error()
    assert "in raise_own_error" in raised.value.remote_traceback


async def test_a_cancellation_that_the_actor_raises_itself_is_an_error(counter: Counter) -> None:
    with pytest.raises(RemoteError, match="CancelledError"):
        await counter.raise_cancelled()
    assert await counter.total() == 3


# ---- cancellation, mailbox, deadline


async def until(condition: Any) -> None:
    """Wait for what the actor itself reports."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  each round is a message to the actor and back
            await asyncio.sleep(0)


async def test_cancelling_a_call_cancels_it_in_the_actor(
    runtime: Runtime, counter: Counter
) -> None:
    call = asyncio.create_task(counter.wait_for_gate("late"))
    await asyncio.sleep(0)
    await counter.cancelled()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    async def is_cancelled() -> bool:
        return await counter.cancelled() == ["late"]

    await until(is_cancelled)
    assert await counter.add(1) == 4
    assert runtime.info(counter).num_pending == 0


async def test_cancelling_a_call_that_waits_behind_another_keeps_it_from_running(
    counter: Counter,
) -> None:
    blocker = asyncio.create_task(counter.wait_for_gate("blocker"))
    queued = asyncio.create_task(counter.add(100))
    await counter.cancelled()
    queued.cancel()
    await asyncio.wait([queued])
    await counter.open_gate()
    assert await blocker == "blocker"
    assert await counter.total() == 3


async def test_a_full_mailbox_makes_the_sender_wait(runtime: Runtime, placement: Placement) -> None:
    counter = await runtime.spawn(Counter, placement=placement, mailbox=2)
    calls = [asyncio.create_task(counter.wait_for_gate("a")), asyncio.create_task(counter.add(1))]
    third = asyncio.create_task(counter.add(2))
    await asyncio.sleep(0)
    info = runtime.info(counter)
    assert (info.num_pending, info.num_waiting) == (2, 1)
    calls[0].cancel()
    assert await third == 3
    assert await calls[1] == 1


async def test_a_call_past_its_deadline_raises_actor_frozen_and_ends_the_actor(
    runtime: Runtime, placement: Placement
) -> None:
    counter = await runtime.spawn(Counter, placement=placement, deadline_s=0.2)
    with pytest.raises(ActorFrozen, match=r"wait_for_gate did not answer within 0\.2 s"):
        await counter.wait_for_gate("never")
    with pytest.raises(ActorFrozen):
        await counter.total()


async def test_a_frozen_actor_is_replaced_within_its_policy(
    runtime: Runtime, placement: Placement
) -> None:
    deadlines_s = {"wait_for_gate": 0.3}
    counter = await runtime.spawn(
        Counter, 7, placement=placement, deadlines_s=deadlines_s, restart=RestartPolicy()
    )
    with pytest.raises(ActorFrozen):
        await counter.wait_for_gate("never")
    assert await counter.total() == 7
    assert runtime.info(counter).num_restarts == 1


async def test_the_wait_behind_other_calls_does_not_count_towards_the_deadline(
    runtime: Runtime, placement: Placement
) -> None:
    async def twelve_calls(scale: float) -> None:
        counter = await runtime.spawn(Counter, placement=placement, deadline_s=0.5 * scale)
        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(counter.block(0.06 * scale))  # 0.72 s in all

    await at_some_pace(twelve_calls)


async def test_waits_for_an_answer_are_listed(counter: Counter) -> None:
    call = asyncio.create_task(counter.wait_for_gate("x"), name="episode 12")
    await asyncio.sleep(0)
    assert ("episode 12", "counter.wait_for_gate") in [(wait.who, wait.on) for wait in list_waits()]
    await counter.open_gate()
    await call
    assert [wait for wait in list_waits() if wait.on.startswith("counter.")] == []


# ---- fan-out


async def test_call_all_answers_in_the_order_of_the_actors(
    runtime: Runtime, placement: Placement
) -> None:
    counters = [await runtime.spawn(Counter, start, placement=placement) for start in (10, 20, 30)]
    assert await call_all(counters, Counter.add, 1) == [11, 21, 31]


async def test_call_all_raises_the_first_error_and_cancels_the_rest(
    runtime: Runtime, placement: Placement
) -> None:
    counters = [await runtime.spawn(Counter, placement=placement) for _ in range(2)]
    await runtime.kill(counters[1])
    with pytest.raises(ActorDied):
        await call_all(counters, Counter.wait_for_gate, "x")

    async def is_cancelled() -> bool:
        return await counters[0].cancelled() == ["x"]

    await until(is_cancelled)


async def test_call_any_takes_the_first_answer_and_cancels_the_rest(
    runtime: Runtime, placement: Placement
) -> None:
    counters = [await runtime.spawn(Counter, placement=placement) for _ in range(2)]
    await counters[1].open_gate()
    assert await call_any(counters, Counter.wait_for_gate, "x") == "x"

    async def is_cancelled() -> bool:
        return await counters[0].cancelled() == ["x"]

    await until(is_cancelled)


async def test_call_as_completed_gives_each_answer_with_its_actor(
    runtime: Runtime, placement: Placement
) -> None:
    slow, fast = [await runtime.spawn(Counter, placement=placement) for _ in range(2)]
    await fast.open_gate()
    finished = []
    async for actor, answer in call_as_completed([slow, fast], Counter.wait_for_gate, "x"):
        finished.append((actor, answer))
        await slow.open_gate()
    assert finished == [(fast, "x"), (slow, "x")]


async def test_tell_does_not_wait_for_the_answer(counter: Counter) -> None:
    await tell(counter, Counter.wait_for_gate, "told")
    await counter.open_gate()
    assert await counter.add(1) == 4


async def test_an_error_that_nobody_awaits_is_logged(
    counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    await tell(counter, Counter.raise_value_error, "unheard")
    await counter.total()
    assert "a call sent with tell() failed" in caplog.text


# ---- streams


async def test_a_stream_gives_every_item_in_order(runtime: Runtime, placement: Placement) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    assert [number async for number in streamer.count(100)] == list(range(100))


async def test_a_stream_gives_arrays(runtime: Runtime, placement: Placement) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    means = [frame.mean() async for frame in streamer.frames(5, (100, 200, 3))]
    assert means == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_an_error_ends_a_stream_after_its_items(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    stream = streamer.count_and_fail(3)
    assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more numbers"):
        await anext(stream)


async def test_a_consumer_that_does_not_read_pauses_the_stream(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    stream = streamer.count_concurrently(10_000)
    assert await anext(stream) == 0
    previous = -1
    while (made := await streamer.made()) != previous:
        previous = made
    assert made <= 17  # a window of 16 items, and one that waits for credit
    await stream.aclose()  # type: ignore[attr-defined]


async def test_closing_a_stream_closes_the_generator_in_the_actor(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    async with contextlib.aclosing(streamer.count(10_000)) as stream:  # type: ignore[type-var]
        async for number in stream:
            if number == 40:
                break
    assert await streamer.closed() == 1
    assert [number async for number in streamer.count(3)] == [0, 1, 2]


async def test_cancelling_a_consumer_stops_the_stream(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    began = asyncio.Event()

    async def consume() -> None:
        async for _ in streamer.count(10_000):
            began.set()
            await asyncio.Event().wait()

    consumer = asyncio.create_task(consume())
    await began.wait()
    consumer.cancel()
    await asyncio.wait([consumer])
    del consumer

    async def is_closed() -> bool:
        return await streamer.closed() == 1

    await until(is_closed)


# ---- beginning and end


async def test_a_constructor_that_raises_raises_in_spawn(
    runtime: Runtime, placement: Placement
) -> None:
    with pytest.raises(ValueError, match="start is -1, expected >= 0") as raised:
        await runtime.spawn(Counter, -1, placement=placement)
    assert "in __init__" in raised.value.__notes__[0]


async def test_an_on_start_that_raises_raises_in_spawn(
    runtime: Runtime, placement: Placement
) -> None:
    with pytest.raises(RuntimeError, match="the simulator is not plugged in"):
        await runtime.spawn(FailsToStart, placement=placement)


async def test_an_actor_that_does_not_start_in_time_is_given_up(
    runtime: Runtime, placement: Placement
) -> None:
    with pytest.raises(TimeoutError, match=r"'slow' was not ready within 0\.8 s"):
        await runtime.spawn(Slow, name="slow", placement=placement, start_timeout_s=0.8)


async def test_a_stopped_actor_finishes_its_calls_and_runs_on_stop(
    runtime: Runtime, placement: Placement, tmp_path: Path
) -> None:
    file = tmp_path / "stopped"
    actor = await runtime.spawn(WritesOnStop, str(file), placement=placement)
    call = asyncio.create_task(actor.ping())
    await asyncio.sleep(0)
    await runtime.stop(actor)
    assert await call is None
    assert file.read_text() == "stopped"
    with pytest.raises(ActorDied, match="stopped by its owner"):
        await actor.ping()


async def test_an_on_stop_that_raises_is_an_error_in_the_log_and_the_actor_ends_all_the_same(
    placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(60):
        async with Runtime(stop_grace_s=30.0) as runtime:
            told = await runtime.spawn(FailsToStop, name="told", placement=placement)
            left = await runtime.spawn(FailsToStop, name="left", placement=placement)
            pids = {await told.ping(), await left.ping()} - {os.getpid()}
            await runtime.stop(told)
            info = runtime.info(told)
            assert (info.state, info.num_pending, info.num_rejected) == ("stopped", 0, 0)
            with pytest.raises(ActorDied, match="stopped by its owner"):
                await told.ping()
    for name in ("told", "left"):
        (record,) = [record for record in caplog.records if f"'{name}'" in record.getMessage()]
        assert (record.levelname, "failed while it ended" in record.getMessage()) == ("ERROR", True)
        assert record.exc_info is not None
        error = record.exc_info[1]
        assert isinstance(error, ValueError)
        assert str(error) == "the gripper does not open"
        assert "in on_stop" in error.__notes__[0]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # noqa: ASYNC240
    assert {record.levelname for record in caplog.records} == {"ERROR"}


async def test_a_killed_actor_fails_its_calls_and_does_not_run_on_stop(
    runtime: Runtime, placement: Placement, tmp_path: Path
) -> None:
    file = tmp_path / "stopped"
    actor = await runtime.spawn(WritesOnStop, str(file), placement=placement)
    await runtime.kill(actor)
    with pytest.raises(ActorDied):
        await actor.ping()
    assert not file.exists()


async def test_leaving_the_runtime_stops_its_actors(placement: Placement, tmp_path: Path) -> None:
    file = tmp_path / "stopped"
    async with asyncio.timeout(60):
        async with Runtime(stop_grace_s=30.0) as runtime:
            actor = await runtime.spawn(WritesOnStop, str(file), placement=placement)
        with pytest.raises(ActorDied):
            await actor.ping()
    assert file.read_text() == "stopped"


async def test_an_error_in_the_body_leaves_the_runtime_as_itself(placement: Placement) -> None:
    async def fail_inside() -> None:
        async with asyncio.timeout(60), Runtime() as runtime:
            await runtime.spawn(Counter, placement=placement)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail_inside()


async def test_loop_lag_is_measured_where_the_actor_runs(
    runtime: Runtime, counter: Counter
) -> None:
    await counter.block(0.4)
    report = await runtime.loop_lag(counter)
    while report.max_s < 0.25:  # it is noticed with the next sample
        await asyncio.sleep(0.05)
        report = await runtime.loop_lag(counter)
    assert report.num_samples >= 1


async def test_an_actor_that_keeps_dying_ends_the_runtime(placement: Placement) -> None:
    if isinstance(placement, InLoop):
        pytest.skip("an actor in this loop has no process to exit from")

    async def crash_three_times() -> None:
        async with asyncio.timeout(60), Runtime() as runtime:
            policy = RestartPolicy(max_restarts=2, within_s=60.0)
            actor = await runtime.spawn(CrashLoop, placement=placement, restart=policy)
            for _ in range(3):
                with pytest.raises(ActorDied, match="exit code 9"):
                    await actor.exit()
            await asyncio.Event().wait()

    with pytest.raises(ActorDied, match="died more often than its restart policy allows"):
        await crash_three_times()
