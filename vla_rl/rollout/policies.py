"""What generates actions, and the policy that one episode sees of it."""

import asyncio
from typing import Protocol

import msgspec

from vla_rl.actors.waits import begin_wait, end_wait
from vla_rl.types import ActionChunk, EpisodeSpec, Observation, Sampling, derive_seed


class PolicyEngine(Protocol):
    """A policy that answers anybody's observation, however it is computed; it batches whoever waits."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that act from now on."""
        ...

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Choose an action chunk; the same observation, sampling (seed included) and weights give the same chunk."""
        ...


class DecisionGauge:
    """How many decisions are being asked of the policy, and for which share of the time there was at least one."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_decisions = 0
        self._asked_s = 0.0
        self._asked_since = 0.0

    def enter(self, now: float) -> None:
        """A decision is being asked."""
        if self.num_waiting == 0:
            self._asked_since = now
        self.num_waiting += 1

    def leave(self, now: float) -> None:
        """A decision was answered, or its episode gave up."""
        self.num_waiting -= 1
        self.num_decisions += 1
        if self.num_waiting == 0:
            self._asked_s += now - self._asked_since

    def asked_s(self, now: float) -> float:
        """Seconds with at least one decision being asked, up to `now`."""
        return self._asked_s + (now - self._asked_since if self.num_waiting else 0.0)


class EpisodePolicy:
    """The policy as one episode sees it: decision k is sampled with a seed of its own, whatever the timing.

    Args:
        engine: answers the decisions.
        episode: whose `sampling` and `policy_seed` are used; decision k has the seed `derive_seed(policy_seed, k)`, so a
            replayed episode makes the same decisions from the same observations.
        gauge: counts the decisions, shared by all episodes of a scheduler.
    """

    def __init__(self, engine: PolicyEngine, episode: EpisodeSpec, gauge: DecisionGauge | None = None) -> None:
        self._engine, self._episode = engine, episode
        self._gauge = gauge if gauge is not None else DecisionGauge()
        self._clock = asyncio.get_running_loop().time
        self._num_decisions = 0

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk. Without `sampling`: the episode's own, with this decision's seed."""
        if sampling is None:
            seed = derive_seed(self._episode.policy_seed, self._num_decisions)
            sampling = msgspec.structs.replace(self._episode.sampling, seed=seed)
        self._num_decisions += 1
        self._gauge.enter(self._clock())
        wait = begin_wait(f"episode {self._episode.episode_id}", on="the policy")
        try:
            return await self._engine.act(observation, sampling)
        finally:
            end_wait(wait)
            self._gauge.leave(self._clock())
