"""Sums that need a calculator, in few characters.

A character-level model of two million parameters can learn them.

    user       23+58-7=?
    assistant  calc {"e": "23+58"}
    tool       81
    assistant  calc {"e": "81-7"}
    tool       74
    assistant  74

The calculator does one operation at a time, so an episode takes as many calls as the problem has
operators, and an answer.
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vla_rl.envs.text.limits import TextLimits
from vla_rl.envs.text.task import Done, TextTask
from vla_rl.types import Info

_OPERATION = re.compile(r"\s*(-?\d{1,12})\s*([+*-])\s*(-?\d{1,12})\s*")
_NUMBER = re.compile(r"-?\d{1,24}")
UNREADABLE = "?"
"""The calculator's answer to anything but one operation."""


class Problem(msgspec.Struct, frozen=True):
    """A chain of operations whose value from left to right equals that by the usual rules."""

    text: str
    value: int
    steps: tuple[tuple[str, int], ...]
    """Each operation in the calculator's notation, and its value: ("23+58", 81), ("81-7", 74)."""


def draw_problem(seed: int, *, num_operators: int, num_digits: int, operators: str) -> Problem:
    """Draw the problem of a seed.

    Numbers have `num_digits` digits, no value on the way is below 0; products come first.
    """
    rng = random.Random(seed)

    def number() -> int:
        return rng.randrange(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)

    chosen = sorted(
        (rng.choice(operators) for _ in range(num_operators)), key=lambda operator: operator != "*"
    )
    value = number()
    text, steps = str(value), []
    for operator in chosen:
        operand = number()
        if operator == "-" and operand > value:
            operand = rng.randint(0, value)
        operation = f"{value}{operator}{operand}"
        value = _value_of(value, operator, operand)
        text += f"{operator}{operand}"
        steps.append((operation, value))
    return Problem(text, value, tuple(steps))


def calculate(expression: str) -> int | None:
    """Compute one operation; return None for anything else."""
    match = _OPERATION.fullmatch(expression)
    return (
        None
        if match is None
        else _value_of(int(match.group(1)), match.group(2), int(match.group(3)))
    )


def is_answer(text: str, value: int) -> bool:
    """Return whether a reply is this number and nothing else."""
    return _NUMBER.fullmatch(text.strip()) is not None and int(text) == value


class ArithmeticTask(TextTask):
    """One sum, a calculator, and an answer that is checked. Reward: 1 for success, 0 otherwise.

    Args:
        num_operators: operations in the problem, and calls that it needs.
        num_digits: digits of its numbers.
        operators: characters of "+-*" to draw from; one that is listed twice is drawn twice as
            often.
        min_tool_calls: a right answer after fewer calculations is not a success; None for one for
            each operator, 0 for a model that may answer without the calculator.
        max_turns: largest number of replies in an episode; None for twice as many as needed.
    """

    def __init__(
        self,
        num_operators: int = 2,
        num_digits: int = 2,
        operators: str = "+-",
        min_tool_calls: int | None = None,
        max_turns: int | None = None,
    ) -> None:
        check_difficulty(num_operators, num_digits, operators)
        self._num_operators, self._num_digits, self._operators = (
            num_operators,
            num_digits,
            operators,
        )
        self._min_tool_calls = num_operators if min_tool_calls is None else min_tool_calls
        self.limits = TextLimits(
            max_turns=2 * (num_operators + 1) if max_turns is None else max_turns
        )
        self._num_calculations = 0

    async def setup(self, seed: int, options: Info) -> str:
        """Return the problem, as `23+58-7=?`."""
        self._problem = draw_problem(
            seed,
            num_operators=self._num_operators,
            num_digits=self._num_digits,
            operators=self._operators,
        )
        return f"{self._problem.text}=?"

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        """Return the calculator."""
        return (self.calc,)

    async def calc(self, e: str) -> str:
        """Work out one operation, such as 23+58."""
        value = calculate(e)
        if value is None:
            return UNREADABLE
        self._num_calculations += 1
        return str(value)

    async def reply(self, text: str) -> Done:
        """Check the answer: a number, and nothing else."""
        is_right = is_answer(text, self._problem.value)
        is_success = is_right and self._num_calculations >= self._min_tool_calls
        info = {"is_right": is_right, "num_calculations": self._num_calculations}
        return Done(float(is_success), is_success, info=info)


def check_difficulty(num_operators: int, num_digits: int, operators: str) -> None:
    """Raise ValueError unless problems can be drawn with these values."""
    if (
        not 1 <= num_operators <= 8
        or not 1 <= num_digits <= 6
        or not operators
        or set(operators) - set("+-*")
    ):
        raise ValueError(
            f"num_operators={num_operators}, num_digits={num_digits}, operators={operators!r}: "
            "expected 1 to 8 operators out of '+-*', and 1 to 6 digits"
        )


def _value_of(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]
