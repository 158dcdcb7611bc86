"""The actor inside a simulator process.

It runs the environments of the process, one message at a time, and packs their results for sending.
"""

import sys
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from vla_rl.actors import Actor
from vla_rl.env_workers.checked_env import CheckedEnv, EnvDescription
from vla_rl.env_workers.packing import (
    ActionGate,
    BlockPacker,
    ObservationLayout,
    Packed,
    Packer,
    RowPacker,
)
from vla_rl.env_workers.spaces import build_space, unmark
from vla_rl.errors import EnvError
from vla_rl.types import EnvSpec, Info

PackedStep: TypeAlias = tuple[Packed, float, bool, bool, Info]
"""A control step for sending: observation, reward, terminated, truncated, info."""

PackedChunk: TypeAlias = tuple[Packed, np.ndarray, bool, bool, Info, np.ndarray | None]
"""A chunk for sending: the fields of a `ChunkOutcome`, in order."""


class EnvSlot:
    """One environment of the process, with what packs its observations.

        with slot as env:  # an EnvError in here closes the environment
            observation, info = env.reset(seed, options)

    An environment that broke its contract is closed at once: its state is unknown, and a later step
    would give a wrong episode instead of an error.
    """

    def __init__(self) -> None:
        self._env: CheckedEnv | None = None
        self._layout = ObservationLayout(spaces.Dict())
        self.packer: Packer = BlockPacker(self._layout)
        self.gate = ActionGate(spaces.Dict(), "no environment")

    @property
    def env(self) -> CheckedEnv:
        """The open environment. Raises: EnvError if there is none."""
        if self._env is None:
            raise EnvError(
                "no environment is open here; the last one broke its contract or was "
                "closed. Open it again."
            )
        return self._env

    def __enter__(self) -> CheckedEnv:
        return self._env or self.env

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, EnvError):
            return
        try:
            self.close()
        except EnvError as second:
            # the first fault is the cause and is raised; this one would hide it
            print(f"closing a broken environment: {second}", file=sys.stderr)

    def build_env(self, spec: EnvSpec) -> EnvDescription:
        """Build the environment, unless it is already open."""
        if self._env is None or self._env.spec != spec:
            self.close()
            # Closed before the next one is built: with LIBERO's real assets, each of two scenes in
            # one process would have its own copies of 450 MB.
            self._env = CheckedEnv(spec)
            description = self._env.description
            self._layout = ObservationLayout(build_space(description.observation_space))
            self.packer = BlockPacker(self._layout)
            self.gate = ActionGate(build_space(description.action_space), spec.id)
        return self._env.description

    def write_rows(self, path: str, index: int, num_rows: int) -> None:
        """Write observations into row `index` of a shared batch, until another environment is
        opened.
        """
        self.packer = RowPacker(self._layout, path, index, num_rows)

    def close(self) -> None:
        """Close the environment, if one is open."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


class EnvWorker(Actor):
    """Owns the environments of one process and runs them on request.

    `env` is the number of one, from 0.

    Each environment is built, run and closed separately: a fault is raised in the call that met it,
    and the process continues. While one of them works the others wait. `batch` is the number of
    the batch that an observation is written to, see `Packer`.

    Args:
        num_envs: number of slots for environments.
    """

    def __init__(self, num_envs: int) -> None:
        self._slots = [EnvSlot() for _ in range(num_envs)]

    async def on_stop(self) -> None:
        """Close all environments. Raises: the first fault, when all are closed."""
        faults = []
        for slot in self._slots:
            try:
                slot.close()
            except EnvError as error:
                faults.append(error)
        if faults:
            raise faults[0]

    async def build_env(self, env: int, spec: EnvSpec) -> EnvDescription:
        """Build an environment, unless it is already open."""
        return self._slots[env].build_env(spec)

    async def write_rows(self, env: int, path: str, index: int, num_rows: int) -> None:
        """Write observations into row `index` of a shared batch from now on."""
        self._slots[env].write_rows(path, index, num_rows)

    async def reset(
        self, env: int, seed: int | None, options: dict[str, Any] | None, batch: int
    ) -> tuple[Packed, Info]:
        """Begin an episode."""
        slot = self._slots[env]
        with slot as opened:
            observation, info = opened.reset(seed, options)
        return slot.packer.pack(observation, batch), info

    async def step(self, env: int, action: Any, batch: int) -> PackedStep:
        """Run one control step; `action` is packed by an `ActionGate`."""
        return _stepped(self._slots[env], action, batch)

    async def step_all(self, actions: list[Any], batch: int) -> list[PackedStep]:
        """Run one control step of each environment here, in order.

        Raises: the first fault, when all have run.
        """
        # All run even after a fault: rows that stopped in between would be one step behind the
        # others, and no caller could tell which.
        steps, faults = [], []
        for slot, action in zip(self._slots, actions, strict=True):
            try:
                steps.append(_stepped(slot, action, batch))
            except EnvError as error:
                faults.append(error)
        if faults:
            raise faults[0]
        return steps

    async def step_chunk(
        self, env: int, actions: np.ndarray, frames_every: int | None
    ) -> PackedChunk:
        """Run the rows until they are done or the episode ends."""
        slot = self._slots[env]
        with slot as opened:
            outcome = opened.step_chunk(actions, frames_every)
        return (
            # Frames are sent beside the observation and not in its block, because their number
            # differs from chunk to chunk.
            slot.packer.pack(outcome.observation),
            outcome.rewards,
            outcome.terminated,
            outcome.truncated,
            outcome.info,
            outcome.frames,
        )

    async def render(self, env: int) -> Any:
        """Return what the environment's render returns."""
        with self._slots[env] as opened:
            return opened.render()

    async def call_method(
        self, env: int, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method as `call_method`; its errors are the caller's, so the environment stays open."""
        return self._slots[env].env.call_method(name, args, kwargs)

    async def set_attribute(self, env: int, name: str, value: list[Any]) -> None:
        """Set an attribute to what `mark` was given."""
        self._slots[env].env.set_attribute(name, unmark(value))

    async def get_state(self, env: int) -> Any:
        """Return the environment's state as plain values."""
        with self._slots[env] as opened:
            return opened.get_state()

    async def set_state(self, env: int, state: Any) -> Packed:
        """Continue from a state of this or another process; return the observation there."""
        slot = self._slots[env]
        with slot as opened:
            observation = opened.set_state(state)
        return slot.packer.pack(observation)

    async def close_env(self, env: int) -> None:
        """Close an environment; the process stays for the next one."""
        self._slots[env].close()


def _stepped(slot: EnvSlot, action: Any, batch: int) -> PackedStep:
    with slot as env:
        observation, reward, terminated, truncated, info = env.step(slot.gate.unpack(action))
    return slot.packer.pack(observation, batch), reward, terminated, truncated, info
