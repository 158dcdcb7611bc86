"""An environment leased to an agent for one episode."""

from collections.abc import Coroutine
from typing import Any

import numpy as np

from vla_rl.simulation.handle import EnvHandle
from vla_rl.types import ChunkOutcome, EpisodeSpec, Info, Observation


class LeasedEnv:
    """One environment, bound to the task, start and seed of one episode. Implements
    `vla_rl.types.Env`.

    Await its methods. After the lease they raise `RuntimeError`, because the simulator may be
    running another episode by then.
    """

    def __init__(self, handle: EnvHandle, episode: EpisodeSpec) -> None:
        self._handle: EnvHandle | None = handle
        self._episode = episode

    @property
    def episode(self) -> EpisodeSpec:
        """The episode of this lease."""
        return self._episode

    @property
    def handle(self) -> EnvHandle:
        """The environment itself: its spaces, and resets to other states than the
        episode's start.
        """
        if self._handle is None:
            raise RuntimeError(
                f"the lease for episode {self._episode.episode_id} is over; its environment may "
                "serve another episode."
            )
        return self._handle

    def reset(self) -> Coroutine[Any, Any, tuple[Observation, Info]]:
        """Bring the environment to the start of its episode."""
        return self.handle.reset(seed=self._episode.seed, options=self._episode.options)

    def step(
        self, action: np.ndarray
    ) -> Coroutine[Any, Any, tuple[Observation, float, bool, bool, Info]]:
        """Run one control step; return observation, reward, terminated, truncated, info."""
        return self.handle.step(action)

    def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> Coroutine[Any, Any, ChunkOutcome]:
        """Run the rows of [H, D] open loop until they are done or the episode ends; one message
        each way.

        See `EnvHandle.step_chunk` for `frames_every`.
        """
        return self.handle.step_chunk(actions, frames_every=frames_every)

    def render(self) -> Coroutine[Any, Any, Any]:
        """Return what the environment's render returns."""
        return self.handle.render()

    def end(self) -> None:
        """End the lease."""
        self._handle = None
