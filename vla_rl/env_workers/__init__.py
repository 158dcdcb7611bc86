"""Simulators in child processes: single handles, a pool for episodes, a vector env. All async.

    async with Runtime(name="main") as runtime, open_env(runtime, "vla_rl/toy_reach-v0") as env:
        observation, info = await env.reset(seed=0)

Imports gymnasium and the actors but no torch; neither does any simulator process.

The names below are imported on first use: a simulator's process imports this package too, and needs
neither the pool nor what starts such processes.
"""

from typing import TYPE_CHECKING

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.env_workers.config import SimulatorConfig as SimulatorConfig
    from vla_rl.env_workers.handle import (
        EnvHandle as EnvHandle,
        LeasedEnv as LeasedEnv,
        open_env as open_env,
    )
    from vla_rl.env_workers.make_env import wrapper_spec as wrapper_spec
    from vla_rl.env_workers.pool import SimulatorPool as SimulatorPool
    from vla_rl.env_workers.vector import ProcessVectorEnv as ProcessVectorEnv, make_vec as make_vec
    from vla_rl.env_workers.worker import EnvWorker as EnvWorker


__getattr__, __dir__ = lazy_names(__name__)
