"""Environments: plain synchronous `gymnasium.Env`s, registered by importing this package.

    import gymnasium, vla_rl
    env = gymnasium.make("vla_rl/toy_reach-v0", task_id=0)

`vla_rl` imports this package with gymnasium, as does the entry point of the group
`gymnasium.envs`. It costs two milliseconds, because it imports only `registration`. To import it
through gymnasium, use its `module:id` form: "vla_rl:vla_rl/toy_reach-v0".
`gymnasium.make_vec` makes a vector environment of processes (`vla_rl.env_workers.make_vec`), except
in the mode "sync". Entry points are strings: an environment's module, and with it its simulator, is
imported when the first one is made. Environments do not depend on asyncio, torch or the trainer.
"""

import functools
from typing import TYPE_CHECKING, Any

from gymnasium.envs.registration import register as _register_one, registry

from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.env_workers import ProcessVectorEnv
    from vla_rl.env_workers.checked_env import run_chunk as run_chunk
    from vla_rl.envs.gymnasium_adapters import ActionChunks as ActionChunks

LIBERO_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
"""The suites of LIBERO, registered as `vla_rl/<suite>-v0` and, with suggestions,
`vla_rl/<suite>-expert-v0`. Suites of LIBERO-PRO and LIBERO-plus are `vla_rl/libero-v0` with
`suite=...`."""

METAWORLD_SUITES = ("metaworld_mt10", "metaworld_mt50")
"""The suites of Meta-World, registered in the same way."""


def _make_vector_env(name: str, /, num_envs: int, **kwargs: Any) -> "ProcessVectorEnv":
    # Processes are imported on demand, because this package is imported with gymnasium.
    from vla_rl.env_workers import make_vec

    return make_vec(name, num_envs, **kwargs)  # `env_id` is an argument of the control tasks


def _register(env_id: str, entry_point: str, kwargs: dict[str, Any] | None = None) -> None:
    # gymnasium writes specs to files, so that an entry point has to be a string; it calls the
    # vector one without the id, so that each id has an attribute of its own
    attribute = env_id.removeprefix("vla_rl/")
    globals()[attribute] = functools.partial(_make_vector_env, f"vla_rl.envs:{env_id}")
    if env_id not in registry:
        _register_one(
            id=env_id,
            entry_point=entry_point,
            vector_entry_point=f"vla_rl.envs:{attribute}",
            kwargs=kwargs or {},
        )


_register("vla_rl/toy_reach-v0", "vla_rl.envs.toy:ToyReachEnv")
_register("vla_rl/control-v0", "vla_rl.envs.gymnasium_adapters:ControlEnv")
_register("vla_rl/faulty-v0", "vla_rl.envs.toy:FaultyEnv")
_register("vla_rl/driving-v0", "vla_rl.envs.driving.one_decision:OpenLoopDrivingEnv")
for _action in ("waypoints", "control"):
    _register(
        f"vla_rl/driving_{_action}-v0",
        "vla_rl.envs.driving.closed_loop:ClosedLoopDrivingEnv",
        {"action": _action},
    )
_register("vla_rl/navsim-v0", "vla_rl.envs.navsim.env:NavsimEnv")
_register("vla_rl/bench2drive-v0", "vla_rl.envs.bench2drive.env:Bench2DriveEnv")
_register("vla_rl/libero-v0", "vla_rl.envs.libero.env:LiberoEnv")
_register("vla_rl/libero_request-v0", "vla_rl.envs.libero.request_env:LiberoRequestEnv")
for _suite in LIBERO_SUITES:
    _register(f"vla_rl/{_suite}-v0", "vla_rl.envs.libero.env:LiberoEnv", {"suite": _suite})
    _register(
        f"vla_rl/{_suite}-expert-v0",
        "vla_rl.envs.libero.env:make_suggesting_env",
        {"suite": _suite},
    )
_register("vla_rl/metaworld-v0", "vla_rl.envs.metaworld.env:MetaWorldEnv")
for _suite in METAWORLD_SUITES:
    _register(f"vla_rl/{_suite}-v0", "vla_rl.envs.metaworld.env:MetaWorldEnv", {"suite": _suite})
    _register(
        f"vla_rl/{_suite}-expert-v0",
        "vla_rl.envs.metaworld.env:make_suggesting_env",
        {"suite": _suite},
    )


def register() -> None:
    """Do nothing more: importing this package has registered its environments.

    It is the entry point of the group `gymnasium.envs`, for programs that load such groups.
    """


__getattr__, __dir__ = lazy_names(__name__)
