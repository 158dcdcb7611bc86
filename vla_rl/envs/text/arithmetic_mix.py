"""Conversations of a half-skilled calculator user, on which the small base checkpoint is trained.

    user       23+58-7=?                            at every turn, with probability `mistakes`, one of
    assistant  calc {"e": "23+58"}                    - a digit of the operation is wrong
    tool       81                                     - it answers before all is worked out, or with a guess
    assistant  calc {"e": "81-7"}                     - it works out what it knows already, once more
    tool       74                                     - the call is not JSON
    assistant  74

After a mistake, the conversation continues with the tool's actual answer. So the base learns the
format and copies numbers, but not which behaviour earns reward.
"""

import random
from collections.abc import Sequence
from typing import Final

from vla_rl.envs.text.tasks.arithmetic import ArithmeticTask, Problem, calculate, draw_problem
from vla_rl.envs.text.tools import Tool
from vla_rl.types import Message, ToolCall, ToolSpec

TOOLS: Final[Sequence[ToolSpec]] = (Tool(ArithmeticTask().calc).spec,)
"""Tools that the environment describes to the policy."""

UNREADABLE: Final = "?"
MAX_TURNS: Final = 8


def conversation(
    seed: int, *, num_operators: int, num_digits: int, operators: str, mistakes: float
) -> tuple[Message, ...]:
    """Draw one conversation, from the question to an answer, right or wrong."""
    rng = random.Random(seed)
    problem = draw_problem(
        rng.randrange(2**31),
        num_operators=num_operators,
        num_digits=num_digits,
        operators=operators,
    )
    return (Message(role="user", content=f"{problem.text}=?"), *solution(problem, rng, mistakes))


def solution(problem: Problem, rng: random.Random, mistakes: float) -> list[Message]:
    """Draw the turns from a question to its answer, right or wrong.

    They are calls, the tool's answers, and a last text.
    """
    messages: list[Message] = []
    values: list[str] = []
    for turn in range(MAX_TURNS):
        num_known = len(values)
        kind = (
            rng.choice(("digit", "early", "again", "guess")) if rng.random() < mistakes else "right"
        )
        if kind == "again" and not values:
            kind = "digit"
        is_worked_out = num_known >= len(problem.steps) and kind != "again"
        if kind in ("early", "guess") or is_worked_out or turn == MAX_TURNS - 1:
            messages.append(Message(role="assistant", content=_answer(problem, values, kind, rng)))
            return messages
        said = calculation(operation_of(problem, values, kind, rng), turn)
        messages += said
        if kind != "again":
            values.append(said[-1].content)
    raise AssertionError("the last turn answers")


def calculation(operation: str, turn: int) -> list[Message]:
    """Return a call of the calculator, and its answer."""
    value = calculate(operation)
    said = UNREADABLE if value is None else str(value)
    call = ToolCall(id=f"call_{turn}", name="calc", arguments='{"e": "' + operation + '"}')
    return [
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=said, tool_call_id=call.id, name="calc"),
    ]


def operation_of(problem: Problem, values: list[str], kind: str, rng: random.Random) -> str:
    """Return the next operation, such as 81-7.

    It has a mistake in it if `kind` is "digit" or "again".
    """
    number = max(len(values) - 1, 0) if kind == "again" else len(values)
    operation = problem.steps[min(number, len(problem.steps) - 1)][0]
    if number and values and number < len(problem.steps):
        # from the tool's answer, which a mistake may have changed
        operation = values[number - 1] + _rest_of(operation)
    if kind == "digit":
        places = [place for place, character in enumerate(operation) if character.isdigit()]
        place = rng.choice(places)
        operation = operation[:place] + rng.choice("0123456789") + operation[place + 1 :]
    return operation


def _rest_of(operation: str) -> str:
    """Return the text after the first number: +58 of 23+58."""
    place = next(place for place, character in enumerate(operation) if place and character in "+-*")
    return operation[place:]


def _answer(problem: Problem, values: list[str], kind: str, rng: random.Random) -> str:
    if kind == "early" and values:
        return values[-1]
    if kind in ("early", "guess", "digit") or not values:
        return str(rng.randrange(10, 200))
    return values[-1]
