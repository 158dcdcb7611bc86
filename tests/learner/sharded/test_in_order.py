"""Calls to a rank are answered in order, and only a few are on the way."""

import asyncio

import pytest
import torch

from vla_rl.learner.distributed.messages import IN_FLIGHT, idle_row, in_order


async def test_answers_are_in_the_order_of_their_inputs_with_few_calls_at_a_time() -> None:
    running: list[int] = []
    most = 0

    async def call(number: int) -> int:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        for _ in range(5 - number):  # later ones are faster
            await asyncio.sleep(0)
        running.remove(number)
        return number * 10

    assert await in_order(call, range(5)) == [0, 10, 20, 30, 40]
    assert most == IN_FLIGHT


async def test_no_input_makes_no_call() -> None:
    async def call(number: int) -> int:
        raise AssertionError("there is nothing to call with")

    assert await in_order(call, []) == []


async def test_the_first_error_is_raised() -> None:
    async def call(number: int) -> int:
        if number == 1:
            raise ValueError("rank 1 refuses")
        return number

    with pytest.raises(ValueError, match="rank 1 refuses"):
        await in_order(call, range(3))


def test_a_rank_without_a_row_passes_the_shortest() -> None:
    assert idle_row(torch.tensor([7, 3, 5])).tolist() == [1]
