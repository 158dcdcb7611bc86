"""What a task asks for, read from LIBERO's goal file, in the order in which it can be done."""

from typing import NamedTuple

from vla_rl.envs.libero.scene import Scene

_ORDER = {"turnon": 0, "turnoff": 0, "open": 1, "on": 2, "in": 2, "close": 3}


class UnreachableError(Exception):
    """The programs cannot reach a goal from the scene as it is; the message says why."""


class Goal(NamedTuple):
    """One condition of a task's goal."""

    predicate: str
    """`on`, `in`, `open`, `close`, `turnon` or `turnoff`."""

    subject: str
    """The object or fixture, or the region of one, that the condition is about."""

    place: str | None
    """Where an `on` or `in` wants it: an object, a fixture or a region."""

    def is_met(self, scene: Scene) -> bool:
        """True where the condition holds now."""
        return bool(scene.domain._eval_predicate([part for part in self if part is not None]))


def goals_of(scene: Scene) -> list[Goal]:
    """The conditions of the scene's task: switches and doors to open first, things to place, doors to close last."""
    goals = [
        Goal(predicate, subject, rest[0] if rest else None)
        for predicate, subject, *rest in scene.domain.parsed_problem["goal_state"]
    ]
    unknown = {goal.predicate for goal in goals} - set(_ORDER)
    if unknown:
        raise ValueError(f"the goal has the conditions {sorted(unknown)}, expected only {', '.join(_ORDER)}.")
    return sorted(goals, key=lambda goal: _ORDER[goal.predicate])
