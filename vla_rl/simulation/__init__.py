"""Simulators in child processes: single handles, a pool for episodes, a vector env. All async.

    async with Runtime(name="main") as runtime, open_env(runtime, "vla_rl/toy_reach-v0") as env:
        observation, info = await env.reset(seed=0)

Imports gymnasium and the actors but no torch; neither does any simulator process.
"""

from vla_rl.simulation.config import SimulatorConfig
from vla_rl.simulation.handle import EnvHandle, LeasedEnv, open_env
from vla_rl.simulation.pool import SimulatorPool
from vla_rl.simulation.vector import ProcessVectorEnv, make_vec
from vla_rl.simulation.worker import EnvWorker
from vla_rl.simulation.wrapping import wrapper_spec

__all__ = [
    "EnvHandle",
    "EnvWorker",
    "LeasedEnv",
    "ProcessVectorEnv",
    "SimulatorConfig",
    "SimulatorPool",
    "make_vec",
    "open_env",
    "wrapper_spec",
]
