"""The scripted expert: reads a task's goal and the hidden state, and runs one program for each
goal.
"""

from collections.abc import Sequence

import numpy as np

from vla_rl.envs.libero.experts.doors import close_door, open_door
from vla_rl.envs.libero.experts.fixtures import (
    Drawer,
    close_drawer,
    is_shut_drawer,
    open_drawer,
    turn_knob,
)
from vla_rl.envs.libero.experts.geometry import has_roof
from vla_rl.envs.libero.experts.motions import (
    OPEN,
    Goal,
    Hand,
    Motion,
    UnreachableError,
    read_goals,
    return_home,
    sort_goals,
)
from vla_rl.envs.libero.experts.not_from_above import make_room, needs_push, push, put_under_roof
from vla_rl.envs.libero.experts.picking import pick_and_place
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.tasks import Task, get_step_limit
from vla_rl.errors import StartError

_WAIT_STEPS = 10
"""Control steps that the expert waits before it looks again: an object that cannot be grasped may
still be moving."""


class Expert:
    """Solves the task of one scene.

    Call `start_over` after each reset, then `act` once for each control step.

    Args:
        scene: the scene.
        goals: what to reach in it, in this order; None for the goals of its task.
    """

    def __init__(self, scene: Scene, goals: Sequence[Goal] | None = None) -> None:
        self._scene = scene
        self._goals = read_goals(scene) if goals is None else list(goals)
        self._obstacle: str | None = None
        self.start_over()

    def start_over(self) -> None:
        """Start over; the next `act` plans from the scene at that time."""
        self._obstacle = None
        self._motion = self._reach_goals(Hand(self._scene))

    def start_midway(self) -> None:
        """Start over where something else has moved the hand; the next `act` goes on from what it grips."""
        self._obstacle = None
        self._motion = self._reach_goals(Hand(self._scene, may_be_midway=True))

    def act(self) -> np.ndarray:
        """Return the action for the current scene, float32 [7]."""
        return next(self._motion)

    @property
    def obstacle(self) -> str | None:
        """Reason why the expert stands still before its task is done, such as an object without a
        grasp; else None.
        """
        return self._obstacle

    def _reach_goals(self, hand: Hand) -> Motion:
        """Reach one unmet goal after the other, and stay once all are met."""
        scene, goals = self._scene, self._goals
        while True:
            unmet = next((goal for goal in goals if not goal.is_met(scene)), None)
            if unmet is None:
                yield from hand.hold(OPEN, 1)
                continue
            try:
                yield from _reach(
                    scene,
                    hand,
                    unmet,
                    # Where two things go to one basket, the first leaves room for the second.
                    is_shared=[goal.target for goal in goals].count(unmet.target) > 1,
                )
                self._obstacle = None
            # The reason is kept: an expert that stood still used to wait for the step limit without
            # a word.
            except UnreachableError as error:
                self._obstacle = str(error)
                yield from hand.hold(OPEN, _WAIT_STEPS)


def _reach(scene: Scene, hand: Hand, goal: Goal, is_shared: bool) -> Motion:
    """Attempt one goal once; `is_shared` if another thing goes to the same target."""
    if goal.target is not None:
        if needs_push(scene, goal):
            return push(scene, hand, goal.subject, goal.target)
        if is_shut_drawer(scene, goal.target):
            return _open_before_grasp(scene, hand, goal.subject, goal.target)
        if goal.predicate == "in" and has_roof(scene, goal.target):
            return put_under_roof(scene, hand, goal.subject, goal.target)
        return pick_and_place(scene, hand, goal.subject, goal.target, is_shared)
    if goal.predicate in ("turnon", "turnoff"):
        return turn_knob(scene, hand, goal)
    if goal.subject not in scene.domain.object_sites_dict:
        return (open_door if goal.predicate == "open" else close_door)(scene, hand, goal.subject)
    return (open_drawer if goal.predicate == "open" else close_drawer)(scene, hand, goal.subject)


def _open_before_grasp(scene: Scene, hand: Hand, name: str, region: str) -> Motion:
    """Open a drawer that `name` is to go into.

    First move `name` to where the open drawer leaves room to grasp it.
    """
    yield from make_room(scene, hand, name, Drawer(scene, region).points_when_open())
    yield from open_drawer(scene, hand, region)


def start_after(scene: Scene, task: Task, goals: Sequence[Sequence[str]]) -> None:
    """Make a start in a scene that another skill has moved: run the expert until goals of another task hold, and
    bring the hand home.

    Args:
        scene: the scene of `task` at the start of an episode; it is moved.
        task: the task of the episode that begins then.
        goals: predicates such as ["on", "plate_1", "flat_stove_1_cook_region"].

    Raises: StartError if the goals do not hold within the suite's step limit, or if the task is solved by it.
    """
    expert = Expert(scene, sort_goals(goals))
    limit = get_step_limit(task.suite)
    num_steps = 0
    while not all(scene.holds(goal) for goal in goals):
        if num_steps == limit:
            raise StartError(
                f"the scripted expert did not reach {' and '.join(' '.join(goal) for goal in goals)} in {limit} "
                f"control steps{f': {expert.obstacle}' if expert.obstacle else ''}; choose another start."
            )
        scene.run_control_step(expert.act().astype(np.float64))
        num_steps += 1
    for action in return_home(scene):
        scene.run_control_step(action.astype(np.float64))
    # a thing that was gripped when the goal held may have fallen
    if not all(scene.holds(goal) for goal in goals):
        raise StartError(
            f"{' and '.join(' '.join(goal) for goal in goals)} came undone while the hand went home; choose "
            "another start."
        )
    if all(goal.is_met(scene) for goal in read_goals(scene)):
        raise StartError(
            f"the expert that acted first has solved {task.key}; choose another after_task."
        )
