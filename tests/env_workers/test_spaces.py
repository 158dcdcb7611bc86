"""Spaces as plain values, and cheap checks against them."""

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.env_workers.spaces import (
    build_space,
    describe_space,
    find_out_of_range,
    observation_check,
)

EVERY_SPACE = [
    spaces.Box(-1.0, 1.0, (7,), np.float32),
    spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, np.inf]), dtype=np.float64),
    spaces.Discrete(5, start=-2),
    spaces.MultiDiscrete([3, 4], start=[1, 0]),
    spaces.MultiBinary((2, 3)),
    spaces.Text(max_length=9, min_length=0, charset="abc "),
    spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.Box(0, 1, (2,), np.float32)})]),
]


@pytest.mark.parametrize("space", EVERY_SPACE, ids=lambda space: type(space).__name__)
def test_a_space_survives_the_journey_as_plain_values(space: spaces.Space[Any]) -> None:
    assert build_space(describe_space(space)) == space


def test_a_space_without_a_plain_form_is_refused() -> None:
    with pytest.raises(TypeError, match="is a Sequence, expected a Box"):
        describe_space(spaces.Sequence(spaces.Discrete(2)))


@pytest.mark.parametrize("space", EVERY_SPACE, ids=lambda space: type(space).__name__)
def test_every_sample_of_a_space_passes_its_check(space: spaces.Space[Any]) -> None:
    space.seed(0)
    check = observation_check(space)
    for _ in range(10):
        sample = space.sample()
        assert check(sample) is None
        assert find_out_of_range(space, sample) is None


OBSERVATION = spaces.Dict(
    {"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "word": spaces.Text(5)}
)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (
            {"image": np.zeros((4, 5, 3), np.uint8), "word": "a"},
            "image is uint8 [4, 5, 3], expected uint8 [4, 4, 3]",
        ),
        (
            {"image": np.zeros((4, 4, 3), int), "word": "a"},
            "image is int64 [4, 4, 3], expected uint8 [4, 4, 3]",
        ),
        ({"image": [[0]], "word": "a"}, "image is list [[0]], expected uint8 [4, 4, 3]"),
        (
            {"image": np.zeros((4, 4, 3), np.uint8)},
            "observation is a dict with the keys ['image'], expected a dict",
        ),
        (
            {"image": np.zeros((4, 4, 3), np.uint8), "word": "too long"},
            "word is str 'too long', expected a value of",
        ),
        (None, "observation is NoneType None, expected a dict with the keys ['image', 'word']"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(value: Any, problem: str) -> None:
    found = observation_check(OBSERVATION)(value)
    assert found is not None
    assert found.startswith(problem)


def test_numbers_out_of_range_are_found_where_they_are() -> None:
    space = spaces.Dict({"state": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    value = {"state": np.array([0.0, 2.0], np.float32)}
    assert observation_check(space)(value) is None
    assert (
        find_out_of_range(space, value)
        == f"state is float32 [2] with values outside {space['state']}"
    )
