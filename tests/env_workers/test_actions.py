"""A wrong action is refused before it leaves, with what it was and what was expected."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.env_workers.packing import ActionGate

ARM = ActionGate(spaces.Box(-1.0, 1.0, (3,), np.float32), "arm-v0")


def test_what_can_be_cast_is_cast() -> None:
    for action in ([0, 1, -1], np.zeros(3, np.float64), (0.5, 0.5, 0.5)):
        assert ARM.check(action).dtype == np.float32
    assert ARM.check_chunk(np.zeros((4, 3))).shape == (4, 3)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (np.zeros(4, np.float32), r"action for arm-v0 is float32 \[4\], expected float32 \[3\]"),
        (np.zeros((1, 3), np.float32), r"is float32 \[1, 3\], expected float32 \[3\]"),
        (np.zeros(3, np.complex64), r"is complex64 \[3\], expected float32 \[3\]"),
        (["a", "b", "c"], r"is <U1 \[3\], expected float32 \[3\]"),
        ([0.0, 1.5, 0.0], r"holds 1.5 at \[1\], expected -1.0 to 1.0; 1 of 3"),
        (
            [np.nan, 0.0, np.inf],
            r"holds nan at \[0\].*2 of 3 numbers are out of range or not finite",
        ),
    ],
)
def test_a_wrong_action_says_what_it_is_and_what_was_expected(action: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ARM.check(action)


@pytest.mark.parametrize("shape", [(3,), (0, 3), (8, 4), (2, 2, 3)])
def test_a_chunk_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="action chunk for arm-v0 is float64"):
        ARM.check_chunk(np.zeros(shape))


def test_a_wrong_number_in_a_chunk_is_found() -> None:
    chunk = np.zeros((8, 3), np.float32)
    chunk[5, 2] = -7
    with pytest.raises(ValueError, match=r"holds -7.0 at \[5, 2\], expected -1.0 to 1.0; 1 of 24"):
        ARM.check_chunk(chunk)


def test_discrete_actions_are_whole_numbers_in_range() -> None:
    gate = ActionGate(spaces.Discrete(3), "keys-v0")
    assert gate.check(np.int64(2)) == 2
    for action in (3, -1, 1.0, [1]):
        with pytest.raises(ValueError, match="action for keys-v0 is"):
            gate.check(action)
    with pytest.raises(ValueError, match="action chunks need a Box space"):
        gate.check_chunk(np.zeros((2, 1)))


def test_any_other_space_is_asked_itself() -> None:
    gate = ActionGate(spaces.MultiDiscrete([2, 3]), "pad-v0")
    assert gate.check([1, 2]).tolist() == [1, 2]
    with pytest.raises(ValueError, match="expected a value of MultiDiscrete"):
        gate.check([1, 3])
