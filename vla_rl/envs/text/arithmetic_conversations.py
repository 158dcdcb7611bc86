"""Conversations of half-skilled calculator users, on which the small base checkpoints are trained.

    user       23+58-7=?                            at every turn, with probability `mistakes`, one of
    assistant  calc {"e": "23+58"}                    - a digit of the operation is wrong
    tool       81                                     - it answers before all is worked out, or with a guess
    assistant  calc {"e": "81-7"}                     - it works out what it knows already, once more
    tool       74                                     - the call is not JSON
    assistant  74

After a mistake, the conversation continues with the tool's actual answer. So the base learns the
format and copies numbers, but not which behaviour earns reward. The base of `grpo_pair` is trained
on conversations of two agents:

    solver   58-7=?     58-7 ─► 51, then 51                  at every turn of the solver something goes wrong with
             n          58-7 ─► 51, then 51                  probability `mistakes`, as above
    checker  58-7=50?   58-7 ─► 51, 51-50 ─► 1, then n       once a round the checker decides too early, works out
             58-7=51?   58-7 ─► 51, 51-51 ─► 0, then y       something else, or says the opposite, as probably

The checker subtracts the proposal from its own result, so that a small model need not compare
digits. Each agent sees its own conversation only, so one conversation is about one of them.
"""

import random
from collections.abc import Sequence
from typing import Final

from vla_rl.envs.text.arithmetic import (
    UNREADABLE,
    ArithmeticTask,
    Problem,
    calculate,
    draw_problem,
)
from vla_rl.envs.text.tools import Tool
from vla_rl.types import Message, ToolCall, ToolSpec

TOOLS: Final[Sequence[ToolSpec]] = (Tool(ArithmeticTask().calc).spec,)
"""Tools that the environment describes to the policy."""

MAX_TURNS: Final = 8


def draw_conversation(
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
    return (
        Message(role="user", content=f"{problem.text}=?"),
        *draw_solution(problem, rng, mistakes),
    )


def draw_solution(problem: Problem, rng: random.Random, mistakes: float) -> list[Message]:
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
        # Nothing is worked out yet that could be worked out once more.
        if kind == "again" and not values:
            kind = "digit"
        is_worked_out = num_known >= len(problem.steps) and kind != "again"
        if kind in ("early", "guess") or is_worked_out or turn == MAX_TURNS - 1:
            messages.append(
                Message(role="assistant", content=_draw_answer(problem, values, kind, rng))
            )
            return messages
        messages += calculator_call(draw_operation(problem, values, kind, rng), turn)
        if kind != "again":
            values.append(messages[-1].content)
    raise AssertionError("the last turn answers")


def calculator_call(operation: str, turn: int) -> list[Message]:
    """Return a call of the calculator, and its answer."""
    value = calculate(operation)
    answer = UNREADABLE if value is None else str(value)
    call = ToolCall(id=f"call_{turn}", name="calc", arguments='{"e": "' + operation + '"}')
    return [
        Message(role="assistant", tool_calls=(call,)),
        Message(role="tool", content=answer, tool_call_id=call.id, name="calc"),
    ]


def draw_operation(problem: Problem, values: list[str], kind: str, rng: random.Random) -> str:
    """Return the next operation, such as 81-7.

    It has a mistake in it if `kind` is "digit" or "again".
    """
    number = max(len(values) - 1, 0) if kind == "again" else len(values)
    operation = problem.steps[min(number, len(problem.steps) - 1)][0]
    if number and values and number < len(problem.steps):
        # from the tool's answer, which a mistake may have changed
        operation = values[number - 1] + _after_first_number(operation)
    if kind == "digit":
        indices = [index for index, character in enumerate(operation) if character.isdigit()]
        index = rng.choice(indices)
        operation = operation[:index] + rng.choice("0123456789") + operation[index + 1 :]
    return operation


def _after_first_number(operation: str) -> str:
    """Return the text after the first number: +58 of 23+58."""
    index = next(index for index, character in enumerate(operation) if index and character in "+-*")
    return operation[index:]


def _draw_answer(problem: Problem, values: list[str], kind: str, rng: random.Random) -> str:
    if kind == "early" and values:
        return values[-1]
    if kind in ("early", "guess", "digit") or not values:
        return str(rng.randrange(10, 200))
    return values[-1]


def draw_pair_conversation(
    seed: int, *, num_operators: int, num_digits: int, operators: str, mistakes: float
) -> tuple[Message, ...]:
    """Draw one conversation, with one or two rounds.

    It is of the solver for an even seed and of the checker for an odd one.
    """
    rng = random.Random(seed)
    problem = draw_problem(
        rng.randrange(2**31),
        num_operators=num_operators,
        num_digits=num_digits,
        operators=operators,
    )
    round_of = _draw_checker_round if seed % 2 else _draw_solver_round
    messages = round_of(problem, rng, mistakes, is_first=True)
    if rng.random() < 0.5:
        messages += round_of(problem, rng, mistakes, is_first=False)
    return tuple(messages)


def _draw_solver_round(
    problem: Problem, rng: random.Random, mistakes: float, *, is_first: bool
) -> list[Message]:
    """Draw the solver's turns: the question or the rejection, and the way to its proposal."""
    asked = f"{problem.text}=?" if is_first else "n"
    return [Message(role="user", content=asked), *draw_solution(problem, rng, mistakes)]


def _draw_checker_round(
    problem: Problem, rng: random.Random, mistakes: float, *, is_first: bool
) -> list[Message]:
    """Draw a proposal, right half of the time, and the checker's way to its verdict.

    The way has at most one mistake.
    """
    proposal = (
        problem.value
        if rng.random() < 0.5
        else max(0, problem.value + rng.choice((-10, -2, -1, 1, 2, 10)))
    )
    messages = [Message(role="user", content=f"{problem.text}={proposal}?")]
    kind = (
        rng.choice(("blind", "early", "digit", "opposite")) if rng.random() < mistakes else "right"
    )
    values: list[str] = []
    for turn in range(len(problem.steps) if kind != "blind" else 0):
        messages += calculator_call(draw_operation(problem, values, kind, rng), turn)
        values.append(messages[-1].content)
    if kind in ("blind", "early"):
        verdict = rng.choice("yn")
    else:
        messages += calculator_call(f"{values[-1]}-{proposal}", len(problem.steps))
        verdict = "y" if (messages[-1].content == "0") != (kind == "opposite") else "n"
    return [*messages, Message(role="assistant", content=verdict)]
