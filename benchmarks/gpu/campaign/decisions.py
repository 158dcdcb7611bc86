"""Decisions a second of 64, 8 and 1 episodes, beside a plain loop over the same network.

Every episode asks again as soon as it has its answer. The plain loop answers all of them in one
batch, one call after the other, as training loops on Hugging Face's models do
(`benchmarks/plain_policy.py`).

Keys, for each number of episodes:
    ours, without_graphs, plain   decisions a second
    compiled                      the same as ours, with compiled blocks
    speedup                       the better of ours and compiled, over plain
    peak_share                    arithmetic of the better one, as a share of the GPU's peak; goal
                                  >= 0.55 with 64 episodes
    mean_batch                    rows of ours

A speedup over the plain loop has no goal: with 64 rows that loop computes almost half of the peak's
arithmetic, so twice its rate is out of reach. With few episodes a batch of weights is read for few
rows, and launches and norms decide.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import torch

from benchmarks.gpu.campaign.machine import peak_flops
from benchmarks.gpu.campaign.target import Target
from benchmarks.plain_policy import PlainPolicy
from benchmarks.policy_sizes import make_observation
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.learner.flops import flop_counter
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Observation, Sampling

if TYPE_CHECKING:
    from vla_rl.engines.vllm import VllmActionEngine

EPISODES: Final = (64, 8, 1)

WARM_UP_S: Final = 4.0
"""Seconds for recording CUDA graphs of all batch sizes."""

MEASURED_S: Final = 4.0


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Measure ours and the plain loop in turn."""
    policy = target.policy()
    plain = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    peak, flops = peak_flops(target), decision_flops(policy)
    measured: dict[int, dict[str, float]] = {}
    for num_episodes in EPISODES:
        seen = observations(policy, num_episodes)
        found = measured[num_episodes] = {"plain": plain_rate(target, plain, seen)}
        found["ours"], found["mean_batch"] = asyncio.run(engine_rate(target, policy, seen))
        if target.is_gpu:
            found["without_graphs"], _ = asyncio.run(
                engine_rate(target, policy, seen, cuda_graphs=False)
            )
        yield str(num_episodes), {**compared(found, flops, peak), **found}
    # last, because the plain loop shares the network
    policy.compile_blocks()
    for num_episodes, found in measured.items():
        seen = observations(policy, num_episodes)
        act_once(policy, seen)  # compiles
        found["compiled"], _ = asyncio.run(engine_rate(target, policy, seen))
        yield str(num_episodes), {**compared(found, flops, peak), **found}


def compared(found: Mapping[str, float], flops: int, peak: float) -> dict[str, float]:
    """Compare the better rate with the plain loop's, and its arithmetic with the peak.

    Args:
        found: decisions a second.
        flops: operations of a decision.
        peak: operations a second.
    """
    best = max(found["ours"], found.get("compiled", 0.0))
    return {"speedup": best / found["plain"], "peak_share": best * flops / peak}


def observations(policy: OpenVlaOft, number: int) -> list[Observation]:
    """Make observations of noise."""
    return [make_observation(policy.config, seed) for seed in range(number)]


def decision_flops(policy: OpenVlaOft) -> int:
    """Count the operations of a decision, without those of a policy's first look at itself."""
    seen = observations(policy, 1)
    act_once(policy, seen)
    with flop_counter() as counter:
        act_once(policy, seen)
    return int(counter.get_total_flops())


def act_once(policy: OpenVlaOft, seen: Sequence[Observation]) -> None:
    """Decide for each observation, in one batch."""
    with torch.inference_mode():
        policy.sample(policy.prepare(seen), [Sampling(seed=seed) for seed in range(len(seen))])


def plain_rate(target: Target, policy: PlainPolicy, seen: Sequence[Observation]) -> float:
    """Return decisions a second in lockstep."""
    policy.act(seen, temperature=1.0)
    made, began = 0, time.perf_counter()
    while made == 0 or time.perf_counter() - began < measured_s(target):
        policy.act(seen, temperature=1.0)
        made += len(seen)
    return made / (time.perf_counter() - began)


async def engine_rate(
    target: Target, policy: OpenVlaOft, seen: Sequence[Observation], *, cuda_graphs: bool = True
) -> tuple[float, float]:
    """Return decisions a second of the engine with one coroutine an episode, and its mean batch."""
    config = EngineConfig(max_batch=len(seen), cuda_graphs=cuda_graphs)
    threads = None if target.is_gpu else torch.get_num_threads()
    async with (
        DeviceLane(num_threads=threads) as lane,
        TorchActionEngine(policy, lane, config) as engine,
        episodes(engine, seen) as asking,
    ):
        await asyncio.sleep(0.0 if target.is_tiny else WARM_UP_S)
        stats = engine.stats()
        rate, after = await asking.rate(measured_s(target)), engine.stats()
    batches = max(after.num_batches - stats.num_batches, 1)
    return rate, (after.num_requests - stats.num_requests) / batches


class Asking:
    """Episodes that ask an engine for one decision after the other."""

    def __init__(self, engine: "TorchActionEngine | VllmActionEngine") -> None:
        self._engine = engine
        self._made, self._last_at = 0, 0.0
        self._answered, self.stops = asyncio.Event(), asyncio.Event()

    async def rate(self, seconds: float) -> float:
        """Measure decisions a second, for at least so long and two answers."""
        # from answer to answer: 64 of them arrive at a time, so a window of seconds cuts batches
        self._answered.clear()
        await self._answered.wait()
        before, began = self._made, self._last_at
        await asyncio.sleep(seconds)
        self._answered.clear()
        await self._answered.wait()
        return (self._made - before) / (self._last_at - began)

    async def ask(self, observation: Observation) -> None:
        """Run one episode until `stops`."""
        while not self.stops.is_set():
            await self._engine.act(observation, Sampling(seed=self._made))
            self._made, self._last_at = self._made + 1, time.perf_counter()
            self._answered.set()


@asynccontextmanager
async def episodes(
    engine: "TorchActionEngine | VllmActionEngine", seen: Sequence[Observation]
) -> AsyncIterator[Asking]:
    """Run an episode for each observation inside the `with` block."""
    asking = Asking(engine)
    async with asyncio.TaskGroup() as tasks:
        for observation in seen:
            tasks.create_task(asking.ask(observation))
        yield asking
        asking.stops.set()


def measured_s(target: Target) -> float:
    """Return the seconds for which a rate is measured."""
    return 0.02 if target.is_tiny else MEASURED_S
