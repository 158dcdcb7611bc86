"""What agents are handed, and what they are: the whole custom-agent API."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np

from vla_rl.types.episode import EpisodeSpec, Sampling
from vla_rl.types.observation import Info, Observation
from vla_rl.types.trajectory import ActionChunk, ChunkOutcome, Trajectory


class Env(Protocol):
    """One environment, leased for one episode, wherever it runs."""

    @property
    def episode(self) -> EpisodeSpec:
        """The episode this lease is for."""
        ...

    async def reset(self) -> tuple[Observation, Info]:
        """Bring the environment to the start of its episode."""
        ...

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Run one control step: observation, reward, terminated, truncated, info."""
        ...

    async def step_chunk(self, actions: np.ndarray, *, frames_every: int | None = None) -> ChunkOutcome:
        """Run the rows of float32 [H, D] open loop until they are done or the episode ends; one message each way.

        With `frames_every` = k, `ChunkOutcome.frames` holds a picture after every k-th control step of the episode.
        """
        ...


class Policy(Protocol):
    """One policy, however and wherever it is computed; batches whoever waits."""

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk. Without `sampling`: the episode's own. Its seed is always this decision's."""
        ...


class EnvPool(Protocol):
    """Environments for episodes. A lease waits for a free one; a dead one is replaced behind the scenes."""

    @property
    def num_envs(self) -> int:
        """How many episodes can play at the same time."""
        ...

    def lease(self, episode: EpisodeSpec) -> AbstractAsyncContextManager[Any]:
        """An environment (`Env`, or `TextEnv`) for this episode; leaving the context frees it, whatever state it is in.

        Raises `ActorDied` out of the env's methods where its process dies or freezes; `EnvError` where it breaks its
        contract.
        """
        ...


Agent: TypeAlias = Callable[[Any, Any], Awaitable[Trajectory]]
"""Of an `Env` and a `Policy`, or of a `TextEnv` and a `LanguagePolicy`, or one by agent name where several share an episode:
`async def agent(env, policy) -> Trajectory`: robots, chat, tools, several policies in one episode."""
