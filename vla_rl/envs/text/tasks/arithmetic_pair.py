"""Sums by two agents that take turns: one solves, one checks."""

from collections.abc import Callable, Sequence
from typing import Any

from vla_rl.envs.text.limits import TextLimits
from vla_rl.envs.text.task import Ask, Done, TextTask
from vla_rl.envs.text.tasks.arithmetic import (
    UNREADABLE,
    calculate,
    check_difficulty,
    draw_problem,
    is_answer,
)
from vla_rl.types import Info


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
        return self._judged(text.strip())

    def _judged(self, verdict: str) -> Ask | Done:
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
        if verdict == "y":  # saved rounds count like the verdict that saved them
            earned *= self._num_rounds - len(self._proposals) + 1
        return Done(earned, is_success, rewards={"solver": float(is_right)}, info=info)
