"""Goals of a task, read from LIBERO's goal file, in an order in which they can be reached."""

from typing import NamedTuple

from vla_rl.envs.libero.scene import Scene

_ORDER = {"turnon": 0, "turnoff": 0, "open": 1, "on": 2, "in": 2, "close": 3}


class UnreachableError(Exception):
    """The programs cannot reach a goal from the current scene; the message names the reason."""


class Goal(NamedTuple):
    """One condition of a task's goal."""

    predicate: str
    """`on`, `in`, `open`, `close`, `turnon` or `turnoff`."""

    subject: str
    """The object or fixture, or the region of one, to which the condition applies."""

    place: str | None
    """Target of an `on` or `in`: an object, a fixture or a region."""

    def is_met(self, scene: Scene) -> bool:
        """Return whether the condition holds now."""
        return bool(scene.domain._eval_predicate([part for part in self if part is not None]))


def goals_of(scene: Scene) -> list[Goal]:
    """Return the conditions of the scene's task: switches and doors to open first, things to place,
    doors to close last.
    """
    goals = [
        Goal(predicate, subject, rest[0] if rest else None)
        for predicate, subject, *rest in scene.domain.parsed_problem["goal_state"]
    ]
    unknown = {goal.predicate for goal in goals} - set(_ORDER)
    if unknown:
        raise ValueError(
            f"the goal has the conditions {sorted(unknown)}, expected only {', '.join(_ORDER)}."
        )
    return sorted(goals, key=lambda goal: _ORDER[goal.predicate])
