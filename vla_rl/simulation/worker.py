"""The actor inside a simulator's process: it runs the environments of the process, one message at a
time.
"""

from typing import Any

import numpy as np

from vla_rl.actors import Actor
from vla_rl.errors import EnvError
from vla_rl.simulation.attributes import unmarked
from vla_rl.simulation.checked import EnvDescription
from vla_rl.simulation.hosted import HostedEnv, PackedChunk, PackedStep
from vla_rl.simulation.layout import Packed
from vla_rl.types import EnvSpec, Info


class EnvWorker(Actor):
    """Owns the environments of one process and runs them on request; `env` is the number of one,
    from 0.

    Each environment is built, run and closed separately: a fault is raised in the call that met it,
    and the process continues. While one of them works the others wait.

    Args:
        num_envs: number of places for environments.
    """

    def __init__(self, num_envs: int) -> None:
        self._envs = [HostedEnv() for _ in range(num_envs)]

    async def on_stop(self) -> None:
        """Close all environments. Raises: the first fault, when all are closed."""
        faults = []
        for env in self._envs:
            try:
                env.close()
            except EnvError as error:
                faults.append(error)
        if faults:
            raise faults[0]

    async def open(self, env: int, spec: EnvSpec) -> EnvDescription:
        """Run `HostedEnv.open`."""
        return self._envs[env].open(spec)

    async def write_rows(self, env: int, path: str, index: int, num_rows: int) -> None:
        """Run `HostedEnv.write_rows`."""
        self._envs[env].write_rows(path, index, num_rows)

    async def reset(
        self, env: int, seed: int | None, options: dict[str, Any] | None, batch: int
    ) -> tuple[Packed, Info]:
        """Run `HostedEnv.reset`."""
        return self._envs[env].reset(seed, options, batch)

    async def step(self, env: int, action: Any, batch: int) -> PackedStep:
        """Run `HostedEnv.step`."""
        return self._envs[env].step(action, batch)

    async def step_all(self, actions: list[Any], batch: int) -> list[PackedStep]:
        """Run one control step of each environment here, in order.

        Raises: the first fault, when all have run.
        """
        steps, faults = [], []
        for env, action in zip(self._envs, actions, strict=True):
            try:
                steps.append(env.step(action, batch))
            except EnvError as error:
                faults.append(error)
        if faults:
            raise faults[0]
        return steps

    async def step_chunk(
        self, env: int, actions: np.ndarray, frames_every: int | None
    ) -> PackedChunk:
        """Run `HostedEnv.step_chunk`."""
        return self._envs[env].step_chunk(actions, frames_every)

    async def render(self, env: int) -> Any:
        """Run `HostedEnv.render`."""
        return self._envs[env].render()

    async def call(self, env: int, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Run `attributes.call`."""
        return self._envs[env].call(name, args, kwargs)

    async def set_attr(self, env: int, name: str, value: list[Any]) -> None:
        """Set an attribute to what `attributes.marked` was given."""
        self._envs[env].set_attr(name, unmarked(value))

    async def get_state(self, env: int) -> Any:
        """Run `HostedEnv.get_state`."""
        return self._envs[env].get_state()

    async def set_state(self, env: int, state: Any) -> Packed:
        """Run `HostedEnv.set_state`."""
        return self._envs[env].set_state(state)

    async def close_env(self, env: int) -> None:
        """Run `HostedEnv.close`; the process stays for the next environment."""
        self._envs[env].close()
