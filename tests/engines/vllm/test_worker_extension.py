"""Greedy requests keep their temperature, whichever row of the batch they are moved to."""

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.needs_vllm


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


def processor() -> Any:
    from vla_rl.engines.vllm.worker_extension import GreedyTemperature

    return GreedyTemperature(None, torch.device("cpu"), False)


def added(row: int, temperature: float | None) -> tuple[Any, ...]:
    extra = None if temperature is None else {"greedy_temperature": temperature}
    return row, SimpleNamespace(extra_args=extra), [], []


def update(**changes: Any) -> Any:
    return SimpleNamespace(**{"removed": [], "added": [], "moved": [], **changes})


def scales(divided: Any, rows: int) -> list[float]:
    """What each row was divided by."""
    return (1.0 / divided.apply(torch.ones(rows, 3)))[:, 0].tolist()


def test_only_greedy_rows_are_divided() -> None:
    greedy = processor()
    greedy.update_state(update(added=[added(0, 2.0), added(1, None), added(2, 4.0)]))
    assert scales(greedy, 3) == [2.0, 1.0, 4.0]
    greedy.update_state(None)
    assert scales(greedy, 3) == [2.0, 1.0, 4.0]


def test_temperatures_move_with_their_requests() -> None:
    greedy = processor()
    greedy.update_state(update(added=[added(0, 2.0), added(1, None), added(2, 4.0)]))
    greedy.update_state(update(removed=[0], moved=[(2, 0, Direction.UNIDIRECTIONAL)]))
    assert scales(greedy, 3) == [4.0, 1.0, 1.0]
    greedy.update_state(update(moved=[(0, 1, Direction.SWAP)]))
    assert scales(greedy, 3) == [1.0, 4.0, 1.0]


def test_a_request_that_takes_a_row_takes_it_without_its_predecessors_temperature() -> None:
    greedy = processor()
    greedy.update_state(update(added=[added(0, 2.0)]))
    greedy.update_state(update(added=[added(0, None)]))
    assert scales(greedy, 1) == [1.0]
