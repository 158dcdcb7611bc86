"""Conversations of two half-skilled agents that solve sums together.

The base of `grpo_pair` is trained on them.

    solver   58-7=?     58-7 ─► 51, then 51                  at every turn of the solver something goes wrong with
             n          58-7 ─► 51, then 51                  probability `mistakes`, as in `arithmetic_mix`
    checker  58-7=50?   58-7 ─► 51, 51-50 ─► 1, then n       once a round the checker judges too early, works out
             58-7=51?   58-7 ─► 51, 51-51 ─► 0, then y       something else, or says the opposite, as probably

The checker subtracts the proposal from its own result, so that a small model need not compare
digits. Each agent sees its own conversation only, so one conversation is about one of them. Both
learn the format, but not which behaviour earns reward.
"""

import random

from vla_rl.envs.text.arithmetic_mix import calculation, operation_of, solution
from vla_rl.envs.text.tasks.arithmetic import Problem, draw_problem
from vla_rl.types import Message


def pair_conversation(
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
    round_of = _checked if seed % 2 else _solved
    messages = round_of(problem, rng, mistakes, is_first=True)
    if rng.random() < 0.5:
        messages += round_of(problem, rng, mistakes, is_first=False)
    return tuple(messages)


def _solved(
    problem: Problem, rng: random.Random, mistakes: float, *, is_first: bool
) -> list[Message]:
    """Draw the solver's turns: the question or the rejection, and the way to its proposal."""
    asked = f"{problem.text}=?" if is_first else "n"
    return [Message(role="user", content=asked), *solution(problem, rng, mistakes)]


def _checked(
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
        messages += calculation(operation_of(problem, values, kind, rng), turn)
        values.append(messages[-1].content)
    if kind in ("blind", "early"):
        verdict = rng.choice("yn")
    else:
        messages += calculation(f"{values[-1]}-{proposal}", len(problem.steps))
        verdict = "y" if (messages[-1].content == "0") != (kind == "opposite") else "n"
    return [*messages, Message(role="assistant", content=verdict)]
