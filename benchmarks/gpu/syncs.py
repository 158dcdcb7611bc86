"""How often the host waits for the device: a network on meta, a batch on the CPU, and a count.

Keys of the last line:
    syncs_per_optimizer_step        waits of an update, for each optimizer step more; goal <= 1, the
                                    gradient's norm
    syncs_per_update_beyond_steps   waits of an update besides those; goal <= 1,
                                    OpenVLA-OFT's first look for a causal trunk
    syncs_per_decision_batch        waits of an engine for a batch of decisions, or for a token of
                                    all running replies; goal <= 1
"""

from functools import partial

from benchmarks.gpu.computations import learn
from benchmarks.gpu.meta_paths import crossings_of
from benchmarks.gpu.tiny_policies import FAMILIES, observation, policy_on_meta
from benchmarks.gpu.watched_paths import Path, WatchedLane, cross
from vla_rl.engines import DeviceLane, EngineConfig, make_torch_engine
from vla_rl.types import Sampling


async def decide(lane: WatchedLane, *, family: str, waits: list[int]) -> None:
    """Decide for one episode, one batch after the other, and note the waits after each."""
    async with make_torch_engine(policy_on_meta(family), lane, EngineConfig()) as engine:
        for seed in range(2):
            await engine.act(observation(family, seed), Sampling(seed=seed))
            waits.append(len(lane.crossings.waits()))


async def converse(lane: DeviceLane, *, tokens: int) -> None:
    """Generate a reply, token by token."""
    async with make_torch_engine(policy_on_meta("language"), lane, EngineConfig()) as engine:
        await engine.generate("one two", sampling=Sampling(seed=1), max_tokens=tokens)


def num_waits(path: Path) -> int:
    """Return how often the host waits in a path."""
    return len(cross(path).waits())


def update_waits(family: str) -> tuple[int, int]:
    """Return the waits of an update for one optimizer step more, and besides its steps."""
    one = len(crossings_of(f"update: {family}").waits())
    each = num_waits(partial(learn, family=family, epochs=2)) - one
    return each, one - each


def decision_waits(family: str) -> int:
    """Return the waits for one batch of decisions more, after the first."""
    if family == "language":
        two, three = (num_waits(partial(converse, tokens=each)) for each in (2, 3))
        return three - two
    waits = list[int]()
    cross(partial(decide, family=family, waits=waits))
    return waits[1] - waits[0]


def figures() -> dict[str, float]:
    """Return the largest numbers over all families."""
    updates = [update_waits(family) for family in FAMILIES if family != "oft diffusion"]
    return {
        "syncs_per_optimizer_step": max(each for each, _ in updates),
        "syncs_per_update_beyond_steps": max(beyond for _, beyond in updates),
        "syncs_per_decision_batch": max(decision_waits(family) for family in FAMILIES),
    }
