"""Sums of two numbers for a language model that has read the web, in the words that it knows.

    system     Add or subtract.
    user       20 + 15 =
    assistant  20 + 15 = 35
    user       58 - 23 =
    assistant  20 + 15 = 35

The first question and its answer show the form: a model that repeats the sum is right more often than
one that names the number alone. With the calculator the example shows a call of it.
`split_sums` holds pairs of numbers out, and `demonstrate_sum` shows how the calculator is used.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

from vla_rl.envs.text.arithmetic import UNREADABLE, calculate
from vla_rl.envs.text.task import Ask, Done, TextLimits, TextTask
from vla_rl.envs.text.tools import Tool
from vla_rl.types import Info, Message, ToolCall, ToolSpec
from vla_rl.util.foreign_data import require_text

SYSTEM = "Add or subtract."
EXAMPLE, EXAMPLE_VALUE = "20 + 15", 35
NUMBERS = range(10, 100)
SPLIT_SEED = 0
"""The held-out pairs are the same in all runs, so that their results can be compared."""

NUM_HELD_OUT: Final = 200
"""Pairs of numbers that demonstrations leave out, and that `grpo_sums` asks by default."""

Scorer: TypeAlias = Literal["exact", "digits", "form"]

_NUMBER = re.compile(r"-?\d+")
# It begins at the beginning of a number only: otherwise a reply of digits alone would be read anew
# from each of them.
_SUM = re.compile(r"(?<!\d)(\d++)\s*+([+-])\s*+(\d++)")


def read_answer(reply: str, problem: str) -> str | None:
    """Return the only number of a reply, which may repeat the problem before it; None if there is no
    number or more than one.

    Only one number counts: otherwise a reply that lists numbers would hold the right one by chance.

    Example:
        read_answer("58 - 23 = 35", "58 - 23") is "35", read_answer("It is 34 or 35.", "58 - 23") is None
    """
    repeated = _SUM.search(reply)
    if repeated is not None and list(repeated.groups()) == problem.split():
        reply = reply[: repeated.start()] + reply[repeated.end() :]
    numbers = _NUMBER.findall(reply)
    return numbers[0] if len(numbers) == 1 else None


def share_right_digits(answer: str, value: str) -> float:
    """Return the share of characters that are right, units below units; missing and surplus ones are wrong.

    Example:
        share_right_digits("135", "35") is 2 / 3
    """
    right = sum(own == other for own, other in zip(answer[::-1], value[::-1], strict=False))
    return right / max(len(answer), len(value))


class SumTask(TextTask):
    """One sum. `options={"problem": "58 - 23"}` selects it.

    Args:
        scorer: exact: 1 for the right number and no other. digits: the share of its digits that are
            right. form: 1 for any one number, the baseline that learns the form of an answer and no
            arithmetic. Success is the right number, whatever is rewarded.
        calculator: the agent has a calculator, and only what was calculated is a success.
    """

    def __init__(self, scorer: Scorer = "exact", calculator: bool = False) -> None:
        self._scorer, self._with_calculator = scorer, calculator
        self.limits = TextLimits(max_turns=4 if calculator else 1)
        self._was_calculated = False

    async def setup(self, seed: int, options: Info) -> Ask:
        """Return the example and the problem."""
        self._problem = require_text(options.get("problem"), "options['problem']")
        value = calculate(self._problem)
        if value is None:
            raise ValueError(f"problem={self._problem!r}, expected a sum such as '58 - 23'")
        self._value = value
        return Ask(_make_question(self._problem, with_calculator=self._with_calculator))

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        """Return the calculator, if there is one."""
        return (self.calc,) if self._with_calculator else ()

    async def calc(self, e: str) -> str:
        """Work out one sum, such as 20 + 15."""
        value = calculate(e)
        self._was_calculated |= value is not None
        return UNREADABLE if value is None else str(value)

    async def reply(self, text: str) -> Done:
        """Check the answer."""
        answer = read_answer(text, self._problem)
        is_right = answer == str(self._value)
        counts = self._was_calculated or not self._with_calculator
        is_success = is_right and counts
        if self._scorer == "form":
            reward = float(answer is not None)
        elif self._scorer == "digits" and answer is not None and counts:
            reward = share_right_digits(answer, str(self._value))
        else:
            reward = float(is_success)
        return Done(reward, is_success, info={"is_right": is_right, "answer": answer})


def _make_question(problem: str, *, with_calculator: bool) -> list[Message]:
    """Return the example and the problem."""
    return [
        Message(role="system", content=SYSTEM),
        *_make_solution(EXAMPLE, EXAMPLE_VALUE, "example", with_calculator=with_calculator),
        Message(role="user", content=f"{problem} ="),
    ]


def _make_solution(
    problem: str, value: int, call_id: str, *, with_calculator: bool
) -> list[Message]:
    """Return a problem, a call of the calculator if there is one, and the answer."""
    call = ToolCall(id=call_id, name="calc", arguments=json.dumps({"e": problem}))
    calculated = (
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=str(value), tool_call_id=call.id),
    )
    return [
        Message(role="user", content=f"{problem} ="),
        *(calculated if with_calculator else ()),
        Message(role="assistant", content=f"{problem} = {value}"),
    ]


def list_sums(low: int, high: int) -> list[str]:
    """Return all sums of two numbers that are not below zero."""
    return [f"{low} + {high}", f"{high} - {low}", *([f"{high} + {low}"] if low < high else [])]


def split_sums(num_held_out: int = NUM_HELD_OUT) -> tuple[list[str], list[str]]:
    """Return the sums to train on, and those held out: one of each held-out pair of numbers."""
    draw = random.Random(SPLIT_SEED)
    pairs = [(low, high) for low in NUMBERS for high in NUMBERS if low <= high]
    draw.shuffle(pairs)
    held_out = [draw.choice(list_sums(*pair)) for pair in pairs[:num_held_out]]
    return [text for pair in pairs[num_held_out:] for text in list_sums(*pair)], held_out


TOOLS: Final[Sequence[ToolSpec]] = (Tool(SumTask(calculator=True).calc).spec,)
"""Tools that the environment describes to the policy."""


def demonstrate_sum(seed: int) -> tuple[Message, ...]:
    """Draw one conversation in which the calculator is called and the answer is right; its sum is
    none of those held out.
    """
    problem = random.Random(seed).choice(split_sums()[0])
    value = calculate(problem)
    assert value is not None
    question = _make_question(problem, with_calculator=True)
    solution = _make_solution(problem, value, "call_0", with_calculator=True)
    return (*question[:-1], *solution)
