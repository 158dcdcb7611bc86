"""The vector entry points of our environments: `gymnasium.make_vec(id)` makes a `ProcessVectorEnv`.

    gymnasium.make_vec("vla_rl/toy_reach-v0", num_envs=4, vectorization_mode="vector_entry_point")

The entry point of the id `vla_rl/NAME` is the attribute NAME of this module. Each is a string,
because gymnasium writes specs to files.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vla_rl.env_workers import ProcessVectorEnv


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return functools.partial(_make, f"vla_rl.envs:vla_rl/{name}")


def _make(name: str, /, num_envs: int, **kwargs: Any) -> "ProcessVectorEnv":
    from vla_rl.env_workers import make_vec  # processes are imported only on demand

    return make_vec(name, num_envs, **kwargs)  # `env_id` is an argument of the control tasks
