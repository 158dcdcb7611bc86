"""Tasks of Meta-World by suite: the multi-task benchmarks MT10 and MT50, in their own order.

The instructions are the descriptions in the paper's table of tasks (Yu et al. 2019,
arXiv:1910.10897, appendix A), which public data sets and policies use too.
"""

import difflib
from types import MappingProxyType
from typing import Final

import msgspec

from vla_rl.envs.image_env import is_whole

INSTRUCTIONS: Final = MappingProxyType(
    {
        "assembly": "Pick up a nut and place it onto a peg",
        "basketball": "Dunk the basketball into the basket",
        "bin-picking": "Grasp the puck from one bin and place it into another bin",
        "box-close": "Grasp the cover and close the box with it",
        "button-press-topdown": "Press a button from the top",
        "button-press-topdown-wall": "Bypass a wall and press a button from the top",
        "button-press": "Press a button",
        "button-press-wall": "Bypass a wall and press a button",
        "coffee-button": "Push a button on the coffee machine",
        "coffee-pull": "Pull a mug from a coffee machine",
        "coffee-push": "Push a mug under a coffee machine",
        "dial-turn": "Rotate a dial 180 degrees",
        "disassemble": "Pick a nut out of a peg",
        "door-close": "Close a door with a revolving joint",
        "door-lock": "Lock the door by rotating the lock clockwise",
        "door-open": "Open a door with a revolving joint",
        "door-unlock": "Unlock the door by rotating the lock counter-clockwise",
        "hand-insert": "Insert the gripper into a hole",
        "drawer-close": "Push and close a drawer",
        "drawer-open": "Open a drawer",
        "faucet-open": "Rotate the faucet counter-clockwise",
        "faucet-close": "Rotate the faucet clockwise",
        "hammer": "Hammer a screw on the wall",
        "handle-press-side": "Press a handle down sideways",
        "handle-press": "Press a handle down",
        "handle-pull-side": "Pull a handle up sideways",
        "handle-pull": "Pull a handle up",
        "lever-pull": "Pull a lever down 90 degrees",
        "pick-place-wall": "Pick a puck, bypass a wall and place the puck",
        "pick-out-of-hole": "Pick up a puck from a hole",
        "pick-place": "Pick and place a puck to a goal",
        "plate-slide": "Slide a plate into a cabinet",
        "plate-slide-side": "Slide a plate into a cabinet sideways",
        "plate-slide-back": "Get a plate from the cabinet",
        "plate-slide-back-side": "Get a plate from the cabinet sideways",
        "peg-insert-side": "Insert a peg sideways",
        "peg-unplug-side": "Unplug a peg sideways",
        "soccer": "Kick a soccer into the goal",
        "stick-push": "Grasp a stick and push a box using the stick",
        "stick-pull": "Grasp a stick and pull a box with the stick",
        "push": "Push the puck to a goal",
        "push-wall": "Bypass a wall and push a puck to a goal",
        "push-back": "Pull a puck to a goal",
        "reach": "Reach a goal position",
        "reach-wall": "Bypass a wall and reach a goal",
        "shelf-place": "Pick and place a puck onto a shelf",
        "sweep-into": "Sweep a puck into a hole",
        "sweep": "Sweep a puck off the table",
        "window-open": "Push and open a window",
        "window-close": "Push and close a window",
    }
)
"""The tasks of MT50 in its order, with their instructions."""

_MT10: Final = (
    "reach",
    "push",
    "pick-place",
    "door-open",
    "drawer-open",
    "drawer-close",
    "button-press-topdown",
    "peg-insert-side",
    "window-open",
    "window-close",
)

SUITES: Final = MappingProxyType({"metaworld_mt10": _MT10, "metaworld_mt50": tuple(INSTRUCTIONS)})
"""Names of the tasks by suite. A task of both suites has the same starts in both."""

STEP_LIMIT: Final = 500
"""Control steps after which an episode has failed, as in Meta-World's own evaluation."""

NUM_INIT_STATES: Final = 50
"""Number of starts of a task that an evaluation uses; Meta-World's benchmarks draw 50 goals too."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One task of a suite.

    Example:
        Task(suite="metaworld_mt50", task_id=19, name="drawer-open")
    """

    suite: str
    task_id: int
    """Position in the suite."""

    name: str
    """Meta-World's name of the task, without its version: `drawer-open`."""

    @property
    def key(self) -> str:
        """Name in results, such as `metaworld_mt50/19`."""
        return f"{self.suite}/{self.task_id}"

    @property
    def instruction(self) -> str:
        """The task in words."""
        return INSTRUCTIONS[self.name]

    @property
    def num_init_states(self) -> int:
        """Number of starts that an evaluation uses."""
        return NUM_INIT_STATES


def list_tasks(suite: str) -> tuple[Task, ...]:
    """Return all tasks of `suite`. Raises: `ValueError` for an unknown suite."""
    if suite not in SUITES:
        raise ValueError(f"suite is {suite!r}, expected one of {', '.join(SUITES)}.")
    return tuple(
        Task(suite=suite, task_id=task_id, name=name) for task_id, name in enumerate(SUITES[suite])
    )


def find_task(suite: str, task_id: int | str) -> Task:
    """Return a task by its position in the suite or by its name, such as `drawer-open`.

    Raises: `ValueError` for an unknown suite or task.
    """
    tasks = list_tasks(suite)
    if isinstance(task_id, str):
        names = [task.name for task in tasks]
        # Public configurations name a task with the version of its environment.
        name = task_id.removesuffix("-v3")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(
                f"task_id is {task_id!r}, {hint}expected one of {suite}'s tasks: "
                f"{', '.join(names)}."
            )
        return tasks[names.index(name)]
    if not is_whole(task_id) or not 0 <= task_id < len(tasks):
        raise ValueError(
            f"task_id is {task_id!r}, expected 0 to {len(tasks) - 1} or a name: {suite} has "
            f"{len(tasks)} tasks."
        )
    return tasks[task_id]
