"""One environment inside a simulator's process: built, kept while the same one is wanted, closed if
it is broken.

Knows nothing about messages; its results are packed for them.
"""

import sys
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

from vla_rl.errors import EnvError
from vla_rl.simulation.actions import ActionGate
from vla_rl.simulation.checked import CheckedEnv, EnvDescription
from vla_rl.simulation.layout import ObservationLayout, Packed
from vla_rl.simulation.packing import BlockPacker, Packer, RowPacker
from vla_rl.simulation.spaces import build_space
from vla_rl.types import EnvSpec, Info

PackedStep: TypeAlias = tuple[Packed, float, bool, bool, Info]
"""A control step for sending: observation, reward, terminated, truncated, info."""

PackedChunk: TypeAlias = tuple[Packed, np.ndarray, bool, bool, Info, np.ndarray | None]
"""A chunk for sending: the fields of a `ChunkOutcome`, in order."""


class HostedEnv:
    """One environment and its packer.

    A method that meets a fault of it raises `EnvError` and closes it.
    """

    def __init__(self) -> None:
        self._env: CheckedEnv | None = None
        self._layout = ObservationLayout(spaces.Dict())
        self._packer: Packer = BlockPacker(self._layout)
        self._gate = ActionGate(spaces.Dict(), "no environment")

    def open(self, spec: EnvSpec) -> EnvDescription:
        """Build the environment, unless it is already open."""
        if self._env is None or self._env.spec != spec:
            self.close()
            self._env = CheckedEnv(spec)
            description = self._env.description
            self._layout = ObservationLayout(build_space(description.observation_space))
            self._packer = BlockPacker(self._layout)
            self._gate = ActionGate(build_space(description.action_space), spec.id)
        return self._env.description

    def write_rows(self, path: str, index: int, num_rows: int) -> None:
        """Write observations into row `index` of a shared batch, until another environment is
        opened.
        """
        self._packer = RowPacker(self._layout, path, index, num_rows)

    def reset(
        self, seed: int | None, options: dict[str, Any] | None, batch: int
    ) -> tuple[Packed, Info]:
        """Begin an episode. `batch`: see `Packer`."""
        try:
            observation, info = self._opened().reset(seed, options)
            return self._packer.pack(observation, batch), info
        except EnvError:
            self._abandon()
            raise

    def step(self, action: Any, batch: int) -> PackedStep:
        """Run one control step; `action` is packed by an `ActionGate`. `batch`: see `Packer`."""
        env = self._env or self._opened()
        try:
            observation, reward, terminated, truncated, info = env.step(self._gate.unpack(action))
        except EnvError:
            self._abandon()
            raise
        return self._packer.pack(observation, batch), reward, terminated, truncated, info

    def step_chunk(self, actions: np.ndarray, frames_every: int | None) -> PackedChunk:
        """Run the rows until they are done or the episode ends."""
        try:
            outcome = self._opened().step_chunk(actions, frames_every)
        except EnvError:
            self._abandon()
            raise
        packed = self._packer.pack(outcome.observation)
        return (
            packed,
            outcome.rewards,
            outcome.terminated,
            outcome.truncated,
            outcome.info,
            outcome.frames,
        )

    def render(self) -> Any:
        """Return what the environment's render returns."""
        try:
            return self._opened().render()
        except EnvError:
            self._abandon()
            raise

    def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
        """Call a method as `attributes.call`.

        Its errors are the caller's, so the environment stays open.
        """
        return self._opened().call(name, args, kwargs)

    def set_attr(self, name: str, value: Any) -> None:
        """Set an attribute of the environment, or of the wrapper that has it."""
        self._opened().set_attr(name, value)

    def get_state(self) -> Any:
        """Return the simulator's state as plain values."""
        try:
            return self._opened().get_state()
        except EnvError:
            self._abandon()
            raise

    def set_state(self, state: Any) -> Packed:
        """Continue from a state of this or another process; return the observation there."""
        try:
            return self._packer.pack(self._opened().set_state(state))
        except EnvError:
            self._abandon()
            raise

    def close(self) -> None:
        """Close the environment, if one is open."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def _opened(self) -> CheckedEnv:
        if self._env is None:
            raise EnvError(
                "no environment is open here; the last one broke its contract or was "
                "closed. Open it again."
            )
        return self._env

    def _abandon(self) -> None:
        """Close a broken environment.

        Its first fault counts, so a second one while closing is only printed.
        """
        try:
            self.close()
        except EnvError as error:
            print(f"closing a broken environment: {error}", file=sys.stderr)
