"""Whether two vector environments give the same."""

from typing import Any

import numpy as np


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Equal values, kinds, shapes and dtypes, all the way down."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert_same(list(ours), list(theirs), where)
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert np.array_equal(ours, theirs), where
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert ours == theirs, where
