"""Simulators in child processes: single handles, a pool for episodes, a vector env. All async.

    async with Runtime(name="main") as runtime, open_env(runtime, "vla_rl/toy_reach-v0") as env:
        observation, info = await env.reset(seed=0)

Imports gymnasium and the actors but no torch; neither does any simulator process.

The names below are imported on first use: a simulator's process imports this package too, and needs
neither the pool nor what starts such processes.
"""

from typing import TYPE_CHECKING

from vla_rl.lazy_names import lazy_names

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "config": ("SimulatorConfig",),
        "handle": ("EnvHandle", "LeasedEnv", "open_env"),
        "pool": ("SimulatorPool",),
        "vector": ("ProcessVectorEnv", "make_vec"),
        "worker": ("EnvWorker",),
        "wrapping": ("wrapper_spec",),
    },
)
