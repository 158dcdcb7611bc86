"""What calls of an actor promise, the same in this loop, in a child process and on another host."""

import asyncio

import numpy as np
import pytest
from sample_actors import (
    Counter,
    Labelled,
    Point,
)

from vla_rl.errors import RemoteError

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


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
