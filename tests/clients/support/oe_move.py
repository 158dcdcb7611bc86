"""An environment of OpenEnv whose action has fields: a direction and a number of steps."""

from enum import StrEnum

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


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


app = create_app(LineEnvironment, Move, Position, env_name="line")
