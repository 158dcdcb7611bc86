"""Sums that need a calculator, in few characters, for one agent or for a solver with a checker.

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

from vla_rl.envs.text.task import Ask, Done, TextLimits, TextTask
from vla_rl.types import Info

_OPERATION = re.compile(r"\s*(-?\d{1,12})\s*([+*-])\s*(-?\d{1,12})\s*")
# A bounded number of digits: int() refuses more than 4,300 of them with ValueError, and a policy
# may write any text.
_NUMBER = re.compile(r"-?\d{1,24}")
UNREADABLE = "?"
"""The calculator's answer to anything but one operation."""


class Problem(msgspec.Struct, frozen=True):
    """A chain of operations whose value from left to right equals that by the usual rules.

    Example:
        Problem(text="23+58-7", value=74, steps=(("23+58", 81), ("81-7", 74)))
    """

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

    # Products come first, so that the value from left to right is also that of the usual rules.
    chosen = sorted(
        (rng.choice(operators) for _ in range(num_operators)), key=lambda operator: operator != "*"
    )
    value = number()
    text, steps = str(value), []
    for operator in chosen:
        operand = number()
        # No value is below 0, because signs would be another thing to learn for a model of
        # characters.
        if operator == "-" and operand > value:
            operand = rng.randint(0, value)
        operation = f"{value}{operator}{operand}"
        value = _compute(value, operator, operand)
        text += f"{operator}{operand}"
        steps.append((operation, value))
    return Problem(text, value, tuple(steps))


def calculate(expression: str) -> int | None:
    """Compute one operation; return None for anything else."""
    match = _OPERATION.fullmatch(expression)
    return (
        None
        if match is None
        else _compute(int(match.group(1)), match.group(2), int(match.group(3)))
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
        # A guess is not rewarded, because it would reward skipping the calculator.
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


def _compute(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


class ArithmeticPairTask(TextTask):
    """A solver proposes, a checker says `y` or `n`; after an `n` the solver tries again.

    Both have the calculator.

        solver   23+58-7=?       ... 74
        checker  23+58-7=74?     ... y

    Success: the last proposal is right, and the checker accepted it.

    Args:
        num_operators, num_digits, operators: as in `ArithmeticTask`.
        num_rounds: largest number of proposals of the solver.
        credit: "team": both earn 1 for success, at the end. "own": the solver earns 1 at the end if
            its last proposal is right, the checker a share of 1 for every verdict that is right.
        max_turns: largest number of replies in an episode, of both agents; None for twice as many
            as needed.
    """

    agents = ("solver", "checker")

    def __init__(
        self,
        num_operators: int = 1,
        num_digits: int = 2,
        operators: str = "+-",
        num_rounds: int = 2,
        credit: str = "team",
        max_turns: int | None = None,
    ) -> None:
        check_difficulty(num_operators, num_digits, operators)
        if num_rounds < 1 or credit not in ("team", "own"):
            raise ValueError(
                f"num_rounds={num_rounds}, credit={credit!r}: expected >= 1 rounds "
                "and 'team' or 'own'"
            )
        self._num_operators, self._num_digits, self._operators = (
            num_operators,
            num_digits,
            operators,
        )
        self._num_rounds, self._is_team = num_rounds, credit == "team"
        needed = 2 * num_rounds * (num_operators + 1)
        self.limits = TextLimits(max_turns=2 * needed if max_turns is None else max_turns)
        self._proposals: list[str] = []
        self._is_checking = False

    async def setup(self, seed: int, options: Info) -> Ask:
        """Return the solver's problem."""
        self._problem = draw_problem(
            seed,
            num_operators=self._num_operators,
            num_digits=self._num_digits,
            operators=self._operators,
        )
        return Ask(f"{self._problem.text}=?", agent="solver")

    def tools(self, agent: str) -> Sequence[Callable[..., Any]]:
        """Return the calculator, for both agents."""
        return (self.calc,)

    async def calc(self, e: str) -> str:
        """Work out one operation, such as 23+58."""
        value = calculate(e)
        return UNREADABLE if value is None else str(value)

    async def reply(self, text: str) -> Ask | Done:
        """Handle a proposal, or a verdict on the last one."""
        self._is_checking = not self._is_checking
        if self._is_checking:
            self._proposals.append(text.strip()[:24])
            return Ask(f"{self._problem.text}={self._proposals[-1]}?", agent="checker")
        return self._handle_verdict(text.strip())

    def _handle_verdict(self, verdict: str) -> Ask | Done:
        is_right = is_answer(self._proposals[-1], self._problem.value)
        is_just = verdict == ("y" if is_right else "n")
        earned = 0.0 if self._is_team else float(is_just) / self._num_rounds
        if verdict != "y" and len(self._proposals) < self._num_rounds:
            return Ask("n", agent="solver", reward=earned)
        is_success = is_right and verdict == "y"
        info = {"is_right": is_right, "num_proposals": len(self._proposals)}
        if self._is_team:
            return Done(
                float(is_success), is_success, rewards={"solver": float(is_success)}, info=info
            )
        # Rounds that a verdict saved count like the verdict.
        if verdict == "y":
            earned *= self._num_rounds - len(self._proposals) + 1
        return Done(earned, is_success, rewards={"solver": float(is_right)}, info=info)
