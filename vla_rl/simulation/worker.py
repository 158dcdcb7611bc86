"""The actor inside a simulator's process: one environment, kept for as long as the same one is wanted."""

import sys
from typing import Any

import numpy as np
from gymnasium import spaces

from vla_rl.actors import Actor, endpoint
from vla_rl.errors import EnvError
from vla_rl.simulation.actions import ActionGate
from vla_rl.simulation.checked import CheckedEnv, EnvDescription
from vla_rl.simulation.layout import ObservationLayout, Packed
from vla_rl.simulation.packing import BlockPacker, Packer, RowPacker
from vla_rl.simulation.spaces import build_space
from vla_rl.types import EnvSpec, Info

_BY_CALLER_S = 86_400.0
"""Resets are timed by `SimulatorProcess`, whose limit is configured; the actor's own deadline is meant for steps."""


class EnvWorker(Actor):
    """Owns one environment and runs it on request; the caller waits, since a simulator can do only one thing.

    An environment that broke its contract is closed, so that the next `open` builds a fresh one; the process stays.
    """

    def __init__(self) -> None:
        self._env: CheckedEnv | None = None
        self._layout = ObservationLayout(spaces.Dict())
        self._packer: Packer = BlockPacker(self._layout)
        self._gate = ActionGate(spaces.Dict(), "no environment")

    async def on_stop(self) -> None:
        """Close the environment."""
        self._close_env()

    @endpoint(deadline_s=_BY_CALLER_S)
    async def open(self, spec: EnvSpec) -> EnvDescription:
        """Build the environment, unless it is the one already here."""
        if self._env is None or self._env.spec != spec:
            self._close_env()
            self._env = CheckedEnv(spec)
            description = self._env.description
            self._layout = ObservationLayout(build_space(description.observation_space))
            self._packer = BlockPacker(self._layout)
            self._gate = ActionGate(build_space(description.action_space), spec.id)
        return self._env.description

    @endpoint(deadline_s=_BY_CALLER_S)
    async def write_rows(self, path: str, index: int, num_rows: int) -> None:
        """From now on write observations into the rows `index` of a shared batch, until another environment is opened."""
        self._packer = RowPacker(self._layout, path, index, num_rows)

    @endpoint(deadline_s=_BY_CALLER_S)
    async def reset(self, seed: int | None, options: dict[str, Any] | None, batch: int) -> tuple[Packed, Info]:
        """Begin an episode. `batch`: see `Packer`."""
        try:
            observation, info = self._open_env().reset(seed, options)
            return self._packer.pack(observation, batch), info
        except EnvError:
            self._abandon_env()
            raise

    async def step(self, action: Any, batch: int) -> tuple[Packed, float, bool, bool, Info]:
        """Run one control step; `action` is packed by an `ActionGate`. `batch`: see `Packer`."""
        env = self._env or self._open_env()
        try:
            observation, reward, terminated, truncated, info = env.step(self._gate.unpack(action))
        except EnvError:
            self._abandon_env()
            raise
        return self._packer.pack(observation, batch), reward, terminated, truncated, info

    async def step_chunk(
        self, actions: np.ndarray, frames_every: int | None
    ) -> tuple[Packed, np.ndarray, bool, bool, Info, np.ndarray | None]:
        """Run the rows until they are done or the episode ends: the fields of a `ChunkOutcome`, in order."""
        try:
            outcome = self._open_env().step_chunk(actions, frames_every)
        except EnvError:
            self._abandon_env()
            raise
        packed = self._packer.pack(outcome.observation)
        return packed, outcome.rewards, outcome.terminated, outcome.truncated, outcome.info, outcome.frames

    async def render(self) -> Any:
        """What the environment's render gives."""
        try:
            return self._open_env().render()
        except EnvError:
            self._abandon_env()
            raise

    async def get_state(self) -> Any:
        """The simulator's state as plain values."""
        try:
            return self._open_env().get_state()
        except EnvError:
            self._abandon_env()
            raise

    async def set_state(self, state: Any) -> Packed:
        """Go on from a state that was got here or elsewhere."""
        try:
            return self._packer.pack(self._open_env().set_state(state))
        except EnvError:
            self._abandon_env()
            raise

    async def close_env(self) -> None:
        """Close the environment; the process stays for the next one."""
        self._close_env()

    def _open_env(self) -> CheckedEnv:
        if self._env is None:
            raise EnvError("no environment is open here; the last one broke its contract or was closed. Open it again.")
        return self._env

    def _close_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _abandon_env(self) -> None:
        """Close what is broken already: its first fault counts, a second one on the way out is only told."""
        try:
            self._close_env()
        except EnvError as error:
            print(f"closing a broken environment: {error}", file=sys.stderr)
