"""The dynamic batcher: who is in a batch, when it is fired, and who hears of a failure."""

import asyncio

import pytest

from vla_rl.rollout import DynamicBatcher


class Gate:
    """Runs batches one at a time, each only when it is let through.

    Answers the double of each request.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started = asyncio.Semaphore(0)
        self.let_through = asyncio.Semaphore(0)
        self.num_running = self.max_running = 0

    async def run(self, requests: list[int]) -> list[int]:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        self.batches.append(requests)
        self.started.release()
        await self.let_through.acquire()
        self.num_running -= 1
        if -1 in requests:
            raise ValueError("minus one")
        return [2 * request for request in requests]


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_first_request_does_not_wait_and_the_rest_share_the_next_batch() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=8) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        first = tasks.create_task(batcher.submit(1))
        await gate.started.acquire()
        others = [tasks.create_task(batcher.submit(number)) for number in (2, 3, 4)]
        await settle()
        assert gate.batches == [[1]]
        gate.let_through.release()
        await gate.started.acquire()
        gate.let_through.release()
        assert await first == 2
        assert [await other for other in others] == [4, 6, 8]
    assert gate.batches == [[1], [2, 3, 4]]
    assert gate.max_running == 1


async def test_a_batch_has_at_most_max_batch_requests_in_order_of_arrival() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=2) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        answers = [tasks.create_task(batcher.submit(number)) for number in range(5)]
        for _ in range(3):
            gate.let_through.release()
        assert [await answer for answer in answers] == [0, 2, 4, 6, 8]
    assert gate.batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("is_runner_first", [False, True])
async def test_a_cancelled_waiter_is_left_out_of_the_batch(is_runner_first: bool) -> None:
    """Also where the runner wakes up in the same turn of the loop, before the cancelled
    task does.
    """
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=8) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(batcher.submit(1))
        await gate.started.acquire()
        unwanted = tasks.create_task(batcher.submit(2))
        wanted = tasks.create_task(batcher.submit(3))
        await settle()
        if is_runner_first:
            gate.let_through.release()
            unwanted.cancel()
        else:
            unwanted.cancel()
            gate.let_through.release()
        gate.let_through.release()
        assert await wanted == 6
    assert gate.batches == [[1], [3]]
    assert unwanted.cancelled()


async def test_a_waiter_cancelled_while_its_batch_runs_leaves_the_others_their_answers() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=8) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        unwanted = tasks.create_task(batcher.submit(1))
        wanted = tasks.create_task(batcher.submit(2))
        await gate.started.acquire()
        unwanted.cancel()
        await settle()
        gate.let_through.release()
        assert await wanted == 4
    assert gate.batches == [[1, 2]]


async def test_a_failing_batch_fails_exactly_its_own_waiters() -> None:
    gate = Gate()
    async with asyncio.timeout(60), DynamicBatcher(gate.run, max_batch=2) as batcher:
        answers = asyncio.gather(
            *(batcher.submit(number) for number in (-1, 5, 6)), return_exceptions=True
        )
        gate.let_through.release()
        gate.let_through.release()
        first, second, third = await answers
    assert isinstance(first, ValueError)
    assert first is second
    assert third == 12


async def test_a_batch_whose_work_is_cancelled_by_others_fails_its_waiters_and_the_next_one_runs() -> (
    None
):
    work: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()

    async def run(requests: list[int]) -> list[int]:
        return requests if requests == [2] else await work

    async with asyncio.timeout(60), DynamicBatcher(run, max_batch=1) as batcher:
        lost = asyncio.ensure_future(batcher.submit(1))
        await settle()
        work.cancel()
        with pytest.raises(
            RuntimeError, match="a batch of 'policy' was lost: its runner was cancelled"
        ) as caught:
            await lost
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert await batcher.submit(2) == 2


async def test_too_few_responses_are_an_error_and_not_a_wrong_answer() -> None:
    async def lose_one(requests: list[int]) -> list[int]:
        return requests[1:]

    async with asyncio.timeout(60), DynamicBatcher(lose_one, max_batch=2) as batcher:
        with pytest.raises(ValueError, match="0 responses to 1 requests"):
            await batcher.submit(1)


async def test_a_full_queue_makes_further_callers_wait_their_turn() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=8, max_queue=2) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(batcher.submit(0))
        await gate.started.acquire()
        answers = [tasks.create_task(batcher.submit(number)) for number in (1, 2, 3, 4)]
        await settle()
        assert batcher.batch_stats().num_queued == 2
        for _ in range(3):
            gate.let_through.release()
        assert [await answer for answer in answers] == [2, 4, 6, 8]
    assert gate.batches == [[0], [1, 2], [3, 4]]


async def test_cancelled_waiters_make_room_in_a_full_queue() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=8, max_queue=2) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(batcher.submit(0))
        await gate.started.acquire()
        unwanted = [tasks.create_task(batcher.submit(number)) for number in (1, 2)]
        wanted = tasks.create_task(batcher.submit(3))
        await settle()
        for task in unwanted:
            task.cancel()
        await settle()
        assert batcher.batch_stats().num_queued == 1
        gate.let_through.release()
        gate.let_through.release()
        assert await wanted == 6
    assert gate.batches == [[0], [3]]


async def test_deterministic_batches_have_exactly_one_request() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=8, deterministic=True) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        for number in range(3):
            tasks.create_task(batcher.submit(number))
            gate.let_through.release()
    assert gate.batches == [[0], [1], [2]]


async def test_a_waiting_time_gathers_a_fuller_batch_and_a_full_one_does_not_wait() -> None:
    gate = Gate()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=2, max_wait_s=3600.0) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(batcher.submit(0))
        await settle()
        assert gate.batches == []
        tasks.create_task(batcher.submit(1))
        gate.let_through.release()
    assert gate.batches == [[0, 1]]


async def test_a_waiting_time_ends_and_fires_what_is_there() -> None:
    gate = Gate()
    gate.let_through.release()
    async with (
        asyncio.timeout(60),
        DynamicBatcher(gate.run, max_batch=2, max_wait_s=0.01) as batcher,
    ):
        assert await batcher.submit(4) == 8
    assert gate.batches == [[4]]


async def test_closing_tells_whoever_still_waits() -> None:
    gate = Gate()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        async with DynamicBatcher(gate.run, max_batch=1) as batcher:
            running = tasks.create_task(asyncio.wait([asyncio.ensure_future(batcher.submit(1))]))
            queued = tasks.create_task(asyncio.wait([asyncio.ensure_future(batcher.submit(2))]))
            await gate.started.acquire()
        for waiting in (running, queued):
            done, _ = await waiting
            assert isinstance(done.pop().exception(), RuntimeError)
        with pytest.raises(RuntimeError, match="is not open"):
            await batcher.submit(3)


async def test_stats_count_batches_by_size() -> None:
    gate = Gate()
    async with asyncio.timeout(60), DynamicBatcher(gate.run, max_batch=2) as batcher:
        for _ in range(3):
            gate.let_through.release()
        await asyncio.gather(*(batcher.submit(number) for number in range(5)))
        stats = batcher.batch_stats()
    assert (stats.num_batches, stats.num_requests, stats.batch_sizes) == (3, 5, {1: 1, 2: 2})
    assert 0 <= stats.busy_share <= 1


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_batch is 0"):
        DynamicBatcher(Gate().run, max_batch=0)
