"""Attributes of an environment arrive in another process as they were."""

from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium import spaces

from vla_rl.env_workers.spaces import call_method, mark, unmark


def sent(value: list[Any]) -> list[Any]:
    """What a message makes of a marked value without arrays."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=list[Any])


@pytest.mark.parametrize(
    "value", [3, "x", None, (1, (2.5, "y")), [1, (2,)], {"a": (1, [2]), "b": {}}, np.float32(0.5)]
)
def test_a_value_is_the_same_after_a_message_with_its_tuples(value: Any) -> None:
    assert unmark(sent(mark(value, "value"))) == value


def test_a_space_is_the_same_after_a_message() -> None:
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(-1.0, 1.0, (2,), np.float32)})
    assert unmark(mark((space, 1), "spaces")) == (space, 1)


class Lamp(gymnasium.Env[int, int]):
    """An environment with an attribute and a method."""

    colour = ("red", "green")

    def shade(self, name: str, by: float = 0.5) -> tuple[str, float]:
        return name, by


def test_a_method_is_called_and_an_attribute_is_read() -> None:
    lamp = gymnasium.wrappers.TimeLimit(Lamp(), 3)
    assert unmark(call_method(lamp, "colour", [], {})) == ("red", "green")
    assert unmark(call_method(lamp, "shade", ["red"], {"by": 0.25})) == ("red", 0.25)
    with pytest.raises(AttributeError, match="size"):
        call_method(lamp, "size", [], {})
