"""Meta-World's 50 manipulation tasks as plain gymnasium environments; importing this package loads
no simulator.

    from vla_rl.envs.metaworld import MetaWorldEnv
    env = MetaWorldEnv("metaworld_mt50", task_id="drawer-open")
    observation, info = env.reset(options={"init_state_id": 7})

The physics, success criteria and scripted experts are those of the package metaworld; the images
are drawn by MuJoCo itself, and only if they are used.
"""

from vla_rl.envs.metaworld.env import MetaWorldEnv as MetaWorldEnv
from vla_rl.envs.metaworld.tasks import (
    SUITES as SUITES,
    find_task as find_task,
    list_tasks as list_tasks,
)
