"""Starts in a scene that another skill has moved: the scripted expert of another task acts first."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from vla_rl.envs.libero.experts.expert import Expert
from vla_rl.envs.libero.experts.motions import sort_goals
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_goals
from vla_rl.envs.libero.tasks import Task, get_step_limit
from vla_rl.errors import StartError

NUM_RELEASES: Final = 11
"""Starts differ by 0 to 10 control steps in which the hand lets go; an open hand takes 8."""


def start_after(
    scene: Scene, task: Task, goals: Sequence[Sequence[str]], num_release_steps: int = 0
) -> None:
    """Run the scripted expert until goals of another task hold.

    Args:
        scene: the scene of `task` at the start of an episode; it is moved.
        task: the task of the episode that begins then.
        goals: predicates such as ["on", "plate_1", "flat_stove_1_cook_region"].
        num_release_steps: control steps for which the expert goes on then, in which it lets go of what it holds.

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
    for _ in range(num_release_steps):
        scene.run_control_step(expert.act().astype(np.float64))
    if all(scene.holds(goal) for goal in read_goals(task.goal_file)):
        raise StartError(
            f"the expert that acted first has solved {task.key}; choose another after_task."
        )
