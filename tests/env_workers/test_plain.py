"""Only plain values and arrays of numbers leave a process."""

import datetime
from typing import Any

import numpy as np
import pytest

from vla_rl.env_workers.spaces import as_plain


def test_scalars_of_numpy_become_pythons_own_at_any_depth() -> None:
    plain = as_plain({"a": [np.float32(0.5), (np.int64(3), None)], 1: np.bool_(True)}, "info")
    assert plain == {"a": [0.5, (3, None)], 1: True}
    assert type(plain["a"][0]) is float
    assert type(plain["a"][1][0]) is int
    assert type(plain[1]) is bool


def test_an_array_of_numbers_stays_the_same_array() -> None:
    array = np.zeros(3, np.float32)
    assert as_plain({"a": array}, "info")["a"] is array


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [datetime.date(2020, 1, 1)]}, r"info\['a'\]\[0\] is a date, expected numbers"),
        ({"a": {None: 1}}, r"info\['a'\] has the key None of NoneType, expected str or int"),
        ({"a": np.array(["x"])}, r"info\['a'\] is an array of <U1, expected numbers"),
        ({1, 2}, "info is a set"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        as_plain(value, "info")
