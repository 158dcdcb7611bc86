"""The carry-over bank: bounded, oldest out, asked only for tasks that nobody solved, and saved as
plain arrays.
"""

import msgspec
import numpy as np
import pytest

from vla_rl.algorithms import BankedTask, ReferenceBank
from vla_rl.learner.checkpoint.state import pack, unpack


def vectors(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(-1, 1, 1)


def filled(size: int = 2) -> ReferenceBank:
    bank = ReferenceBank(size)
    bank.add(3, vectors(1, 2, 3), np.array([True, True, False]), ["a", "b", "a"])
    bank.add(5, vectors(4, 5), np.array([True, True]), ["a", "a"])
    return bank


NOBODY = np.array([False, False, False])


def test_the_oldest_success_of_a_task_goes_first_and_failures_are_never_kept() -> None:
    kept = filled(size=2).references(["a", "b", "c"], NOBODY)
    assert {task: row.ravel().tolist() for task, row in kept.items()} == {
        "a": [4.0, 5.0],
        "b": [2.0],
    }
    assert filled(size=3).references(["a"], NOBODY[:1])["a"].ravel().tolist() == [1.0, 4.0, 5.0]


def test_a_task_with_a_success_of_its_own_asks_for_nothing() -> None:
    kept = filled().references(["a", "b", "b"], np.array([True, False, False]))
    assert list(kept) == ["b"]


def test_a_bank_of_size_zero_keeps_nothing() -> None:
    bank = filled(size=0)
    assert bank.references(["a", "b"], NOBODY[:2]) == {}
    assert bank.state() == {}
    assert bank.metrics(9) == {"reward/bank_size": 0.0}


def test_the_metrics_show_how_old_the_references_are() -> None:
    # kept are: task a from update 5 twice, task b from update 3; at update 7 that is 2, 2 and 4
    # updates ago
    assert filled().metrics(7) == {
        "reward/bank_size": 3.0,
        "reward/bank_age_mean": pytest.approx(8 / 3),
        "reward/bank_age_max": 4.0,
    }


def test_an_update_that_is_made_again_takes_the_place_of_what_it_left() -> None:
    bank = filled(size=4)
    bank.add(5, vectors(4, 5), np.array([True, True]), ["a", "a"])
    assert bank.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [1.0, 4.0, 5.0]


def test_a_restored_bank_goes_on_as_the_saved_one_would_have() -> None:
    bank, copy = filled(), ReferenceBank(2)
    copy.restore(unpack(pack(bank.state()), dict[str, BankedTask]))
    for each in (bank, copy):
        each.add(6, vectors(7), np.array([True]), ["a"])
    assert copy.metrics(8) == bank.metrics(8)
    assert copy.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [5.0, 7.0]


def test_a_smaller_bank_keeps_the_newest_of_what_is_restored() -> None:
    small = ReferenceBank(1)
    small.restore(filled().state())
    assert small.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [5.0]


def test_the_bank_owns_what_it_keeps() -> None:
    bank, mine = ReferenceBank(1), vectors(1)
    bank.add(0, mine, np.array([True]), ["a"])
    mine[:] = 9.0
    assert bank.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [1.0]
    assert all(
        isinstance(value, np.ndarray)
        for value in msgspec.structs.asdict(bank.state()["a"]).values()
    )


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size is -1"):
        ReferenceBank(-1)
