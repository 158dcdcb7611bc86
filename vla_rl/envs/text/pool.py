"""A pool of text environments: a pool of simulators' contract, without a process for each.

    async with TextEnvPool(TextPoolConfig(num_envs=64)) as pool:
        async with pool.lease(episode) as env:      # `episode.env` names the task: `EnvSpec(id="text/arithmetic")`
            start = await env.reset()

An episode is a coroutine in this loop; tools, scorers and code run in the sandbox that the pool
owns.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from vla_rl.actors.waits import waiting
from vla_rl.envs.text.episode import TextEpisode
from vla_rl.envs.text.registry import make_text_task
from vla_rl.sandbox import Sandbox, SandboxConfig
from vla_rl.types import Config, EnvSpec, EpisodeSpec


class TextPoolConfig(Config, frozen=True, kw_only=True):
    """Number of concurrent text episodes, and their sandbox."""

    num_envs: int = 64
    """Number of concurrent episodes; each is a coroutine, so hundreds cost little."""

    sandbox: SandboxConfig = SandboxConfig()
    """Processes for tools, scorers and code."""

    def __post_init__(self) -> None:
        self.require(self.num_envs >= 1, "num_envs", ">= 1")


class TextEnvPool:
    """Implements `vla_rl.types.EnvPool` for text environments.

    Args:
        config: sizes and sandbox.
        specs: environments that will be used, if known: a wrong name or argument is rejected on
            entering.

    Raises on entering: ConfigError for a spec that cannot be made.
    """

    def __init__(self, config: TextPoolConfig | None = None, specs: Sequence[EnvSpec] = ()) -> None:
        self._config = config if config is not None else TextPoolConfig()
        self._specs = tuple(specs)
        self._sandbox = Sandbox(self._config.sandbox)
        self._free = asyncio.Semaphore(self._config.num_envs)
        self._num_leases = 0
        self._wait_s = 0.0
        self._is_open = False

    async def __aenter__(self) -> Self:
        made: list[EnvSpec] = []
        for spec in self._specs:
            if spec not in made:
                made.append(spec)
                make_text_task(spec)
        await self._sandbox.__aenter__()
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
        await self._sandbox.__aexit__(kind, error, trace)

    @property
    def num_envs(self) -> int:
        """Number of episodes that can run at the same time."""
        return self._config.num_envs

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[TextEpisode]:
        """Lease an environment for this episode; leaving the context frees it in any state.

        Raises: ConfigError if the environment cannot be made; RuntimeError if the pool is not open.
        """
        if not self._is_open:
            raise RuntimeError("the pool of text environments is not open; use `async with`.")
        loop = asyncio.get_running_loop()
        began = loop.time()
        with waiting(f"episode {episode.episode_id}", on="a free text environment"):
            await self._free.acquire()
        try:
            self._num_leases += 1
            self._wait_s += loop.time() - began
            env = TextEpisode(make_text_task(episode.env), episode, self._sandbox)
            try:
                yield env
            finally:
                env.end()
        finally:
            self._free.release()

    def metrics(self) -> dict[str, float]:
        """Return counts since the start; keys read like paths."""
        calls: Counter[str] = self._sandbox.counts
        return {
            "text/leases": float(self._num_leases),
            "text/lease_wait_s": self._wait_s,
            **{f"text/calls/{name}": float(count) for name, count in sorted(calls.items())},
        }
