"""The custom-agent API: agents, and the environments and policies that they get."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from vla_rl.types.episode import EpisodeSpec, Sampling
from vla_rl.types.observation import Info, Observation
from vla_rl.types.trajectory import ActionChunk, ChunkOutcome, Trajectory


class Env(Protocol):
    """One environment, leased for one episode, in any process."""

    @property
    def episode(self) -> EpisodeSpec:
        """The episode that this lease is for."""
        ...

    async def reset(self) -> tuple[Observation, Info]:
        """Reset the environment to the start of its episode."""
        ...

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step. Return observation, reward, terminated, truncated and info."""
        ...

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        """Run the rows of float32 [H, D] open loop, with one message each way.

        Stops when all have run or the episode ends.

        With `frames_every` = k, `ChunkOutcome.frames` holds a frame after every k-th control step
        of the episode.
        """
        ...


class Policy(Protocol):
    """A policy that chooses actions; it batches the requests that wait."""

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk.

        Without `sampling`, the episode's own is used. The seed is always this decision's.
        """
        ...


class EnvPool(Protocol):
    """Environments for episodes. A lease waits for a free one; the pool replaces dead ones."""

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        ...

    def lease(self, episode: EpisodeSpec) -> AbstractAsyncContextManager[Any]:
        """Lease an environment (`Env` or `TextEnv`) for this episode.

        Leaving the context frees it, in any state.

        The environment's methods raise `ActorDied` if its process dies or freezes, `EnvError` if it
        breaks its contract.
        """
        ...


Agent: TypeAlias = Callable[[Any, Any], Awaitable[Trajectory]]
"""An agent, `async def agent(env, policy) -> Trajectory`: robots, chat, tools, several policies in
one episode.

It gets an `Env` and a `Policy`, or a `TextEnv` and a `LanguagePolicy`, or one policy by agent name
if several agents share an episode."""
