"""LIBERO's 130 manipulation tasks as plain gymnasium environments; importing this package loads no
simulator.

    from vla_rl.envs.libero import LiberoEnv, find_task, list_tasks
    env = LiberoEnv("libero_object", task_id=1, assets="/data/libero/assets")
    observation, info = env.reset(seed=0, options={"init_state_id": 7})

The tasks, initial states, goals and physics are those of hf-libero and robosuite 1.4; the images
are drawn by MuJoCo itself, and only if they are used.
"""

from vla_rl.envs.libero.env import LiberoEnv as LiberoEnv
from vla_rl.envs.libero.tasks import (
    SUITES as SUITES,
    Task as Task,
    find_task as find_task,
    list_tasks as list_tasks,
)
