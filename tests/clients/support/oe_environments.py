"""Environments of OpenEnv whose actions are texts (a sum, by the seed), have fields (a direction, a number of steps),
or are calls of tools (MCP).
"""

from enum import StrEnum
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field


class Answer(Action):
    answer: str


class Question(Observation):
    question: str | None = None


class SumEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, largest: int = 9) -> Question:
        self._left = (seed or 0) % (largest + 1)
        self._state = State()
        return Question(question=f"What is {self._left} plus 3?")

    def step(self, action: Answer) -> Question:
        self._state.step_count += 1
        is_right = action.answer.strip() == str(self._left + 3)
        return Question(done=is_right, reward=float(is_right), question="Try again.")

    @property
    def state(self) -> State:
        return self._state


question_app = create_app(SumEnvironment, Answer, Question, env_name="sums", max_concurrent_envs=4)


class Direction(StrEnum):
    LEFT = "LEFT"
    RIGHT = "RIGHT"


class Move(Action):
    direction: Direction = Field(..., description="Where to go.")
    steps: int = Field(..., ge=1, le=3)


class Position(Observation):
    x: int


class LineEnvironment(Environment):
    def __init__(self) -> None:
        super().__init__()
        self._x = 0

    def reset(self) -> Position:
        self._x = 0
        return Position(x=0)

    def step(self, action: Move) -> Position:
        self._x += action.steps if action.direction is Direction.RIGHT else -action.steps
        return Position(x=self._x, done=self._x >= 3, reward=1 if self._x >= 3 else -0.1)

    @property
    def state(self) -> State:
        return State()


move_app = create_app(LineEnvironment, Move, Position, env_name="line")


class AddEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("add")

        @server.tool
        def add(left: int, right: int) -> int:
            """Add two numbers."""
            return left + right

        super().__init__(server)

    def reset(self, seed: int | None = None, **options: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Action, timeout_s: float | None = None, **options: Any) -> Any:
        return Observation()

    @property
    def state(self) -> State:
        return State()


tools_app = create_app(
    AddEnvironment, CallToolAction, CallToolObservation, env_name="add", max_concurrent_envs=4
)
