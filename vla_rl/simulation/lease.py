"""An environment leased for one episode: what an agent is handed."""

from typing import Any

import numpy as np

from vla_rl.simulation.handle import EnvHandle
from vla_rl.types import ChunkOutcome, EpisodeSpec, Info, Observation


class LeasedEnv:
    """One environment, bound to the task, start and seed of one episode. Implements `vla_rl.types.Env`.

    After the lease its methods raise `RuntimeError`: the simulator may be playing somebody else's episode by then.
    """

    def __init__(self, handle: EnvHandle, episode: EpisodeSpec) -> None:
        self._handle: EnvHandle | None = handle
        self._episode = episode

    @property
    def episode(self) -> EpisodeSpec:
        """The episode this lease is for."""
        return self._episode

    @property
    def handle(self) -> EnvHandle:
        """The environment itself: its spaces, and a reset to something else than the episode's start."""
        if self._handle is None:
            raise RuntimeError(
                f"the lease for episode {self._episode.episode_id} is over; its environment has moved on."
            )
        return self._handle

    async def reset(self) -> tuple[Observation, Info]:
        """Bring the environment to the start of its episode."""
        return await self.handle.reset(seed=self._episode.seed, options=self._episode.options)

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step: observation, reward, terminated, truncated, info."""
        return await self.handle.step(action)

    async def step_chunk(self, actions: np.ndarray, *, frames_every: int | None = None) -> ChunkOutcome:
        """Run the rows of [H, D] open loop until they are done or the episode ends; one message each way.

        See `EnvHandle.step_chunk` for `frames_every`.
        """
        return await self.handle.step_chunk(actions, frames_every=frames_every)

    async def render(self) -> Any:
        """What the environment's render gives."""
        return await self.handle.render()

    def end(self) -> None:
        """End the lease."""
        self._handle = None
