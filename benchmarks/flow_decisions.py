"""Compare the log-probs that acting reports with a learner's, and batches of decisions with single ones.

Both use a small flow policy of LIBERO's size: two cameras of 84 pixels, a state, chunks of 8 x 7 numbers.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from vla_rl import load_policy
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.models.flow.network import FlowInputs, Prefix
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.prismatic.action_tokens import unit_bounds
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.shipped import FLOW_BASE_POLICY
from vla_rl.types import Observation, Sampling, with_drawn

NUM_DECISIONS: Final = 16
NUM_ROUNDS: Final = 3

ENGINE: Final = EngineConfig()

FIXED_S: Final = 0.02
ROW_S: Final = 0.0005
"""Time of a slow policy's batch: fixed, and for each row."""

SHAPE: Final = SmallFlowConfig(
    actions=unit_bounds(7),
    state=StateConfig(mean=(0.0,) * 8, std=(1.0,) * 8),
    cameras=("image", "wrist_image"),
    optional_cameras=("wrist_image",),
    image_size=84,
    patch_size=12,
    horizon=8,
    depth=4,
    width=256,
    expert_width=192,
)


TINY: Final = replace(SHAPE, depth=1, width=16, expert_width=16)
"""A network whose own computation is small beside the time that it is made to take."""


def make_policy(shape: SmallFlowConfig = SHAPE) -> FlowPolicy:
    """Create the policy; the layers that begin at 0 get weights of the size that training gives them."""
    policy = create_small_flow(shape, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in policy.network.named_parameters():
            if name.startswith("action_out") or ".dense." in name:
                weights.normal_(0.0, 0.02, generator=generator)
    return policy


def make_observations(num: int) -> list[Observation]:
    """Make observations with instructions of different lengths; every third lacks the hand camera."""
    made: list[Observation] = []
    for number in range(num):
        random = np.random.default_rng(number)
        images = random.integers(0, 256, (2, 84, 84, 3), dtype=np.uint8)
        seen: Observation = {
            "image": images[0],
            "state": random.normal(size=8).astype(np.float32),
            "instruction": " ".join(["put the red mug on the left plate"] * (1 + number % 3)),
        }
        made.append(seen if number % 3 == 2 else {**seen, "wrist_image": images[1]})
    return made


def sample(policy: FlowPolicy, seen: Sequence[Observation], first_seed: int) -> Any:
    """Choose one decision for each observation, in one batch."""
    samplings = [Sampling(seed=first_seed + row) for row in range(len(seen))]
    with torch.inference_mode():
        return policy.sample(policy.prepare(seen), samplings)


def measure_first_ratio(policy: FlowPolicy) -> dict[str, float]:
    """Return the largest log-ratio of a decision before any update: in the batch that acted, and in
    others, where order, number of rows, padding and cameras differ.

    `first_ratio_limit` is the bound for the latter, 2e-6 * sqrt(counted numbers / 8).
    """
    seen = make_observations(NUM_DECISIONS)
    acted = sample(policy, seen, 0)
    rows = [
        with_drawn(each, {name: values[row].numpy() for name, values in acted.drawn.items()})
        for row, each in enumerate(seen)
    ]

    def find_largest(order: Sequence[int]) -> float:
        batch, tokens = policy.prepare([rows[row] for row in order]), acted.tokens[list(order)]
        with torch.inference_mode():
            found, _ = policy.log_probs(batch, tokens, torch.ones(len(order)))
        return float((found - acted.log_probs[list(order)]).double().sum(1).abs().max())

    reverse = list(reversed(range(NUM_DECISIONS)))
    parts = [reverse[first : first + size] for size in (1, 3, 8) for first in range(0, 16, size)]
    return {
        "first_ratio_same_batch": find_largest(range(NUM_DECISIONS)),
        "first_ratio_max_diff": max(find_largest(part) for part in parts),
        "first_ratio_limit": 2e-6 * math.sqrt(acted.tokens.shape[1] / 8),
    }


class SlowNetwork:
    """A network whose forward passes take `FIXED_S + ROW_S * rows` for a decision, asleep.

    Half of it is the prefix, the other half the K steps. It stands for a policy on a GPU, where a pass of one
    row costs nearly as much as one of sixteen, without needing one.

    Args:
        network: computes the numbers.
        num_steps: K.
    """

    def __init__(self, network: Any, num_steps: int) -> None:
        self._network, self._num_steps = network, num_steps
        self._embed_prefix, self._velocity = network.embed_prefix, network.velocity

    def __enter__(self) -> None:
        self._network.embed_prefix, self._network.velocity = self.embed_prefix, self.velocity

    def __exit__(self, *_: object) -> None:
        del self._network.embed_prefix, self._network.velocity

    def embed_prefix(self, inputs: FlowInputs) -> Prefix:
        """Read observations, slowly."""
        time.sleep((FIXED_S + ROW_S * len(inputs.images)) / 2)
        return self._embed_prefix(inputs)  # type: ignore[no-any-return]

    def velocity(self, prefix: Prefix, x: Tensor, at: Tensor) -> Tensor:
        """Predict a velocity, slowly."""
        time.sleep((FIXED_S + ROW_S * len(x)) / 2 / self._num_steps)
        return self._velocity(prefix, x, at)  # type: ignore[no-any-return]


async def act_together(policy: FlowPolicy, seen: Sequence[Observation]) -> float:
    """Let the engine decide in as many episodes at once as there are observations, `NUM_ROUNDS` times each.

    Returns: the mean number of decisions in a batch.
    """
    async with DeviceLane(num_threads=1) as lane, TorchActionEngine(policy, lane, ENGINE) as engine:

        async def run_episode(number: int) -> None:
            for step in range(NUM_ROUNDS):
                await engine.act(seen[number], Sampling(seed=100 * number + step))

        await asyncio.gather(*(run_episode(number) for number in range(len(seen))))
        stats = engine.stats()
        return stats.num_requests / stats.num_batches


def act_alone(policy: FlowPolicy, seen: Sequence[Observation]) -> None:
    """Make the same decisions one after another, as a plain sampling loop does."""
    for number, each in enumerate(seen):
        for step in range(NUM_ROUNDS):
            sample(policy, [each], 100 * number + step)


def compare_decisions(
    policy: FlowPolicy, seen: Sequence[Observation], clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Return the time of decisions one after another over that through the engine, the engine's
    milliseconds for a decision, and the mean size of its batches.

    Turns of both alternate; the fastest of each counts, because others use the machine too.
    """
    together, alone, size = [], [], 0.0
    for _ in range(NUM_ROUNDS):
        began = clock()
        size = asyncio.run(act_together(policy, seen))
        between = clock()
        act_alone(policy, seen)
        together.append(between - began)
        alone.append(clock() - between)
    decision_s = min(together) / (NUM_ROUNDS * len(seen))
    return min(alone) / min(together), 1e3 * decision_s, size


def measure_decisions() -> dict[str, float]:
    """Return how many times as fast 16 episodes are through the engine as one after another: for a policy
    of 20 ms + 0.5 ms a row (by the clock), and for the shipped base (in CPU time).
    """
    seen = make_observations(NUM_DECISIONS)
    policy = make_policy(TINY)
    with SlowNetwork(policy.network, policy.config.sampling.num_steps):
        slow, slow_ms, size = compare_decisions(policy, seen, time.perf_counter)
    base = load_policy(str(FLOW_BASE_POLICY), CheckpointFormat(), "cpu")
    assert isinstance(base, FlowPolicy)
    shipped, shipped_ms, _ = compare_decisions(
        base, [base.example_observation(seed) for seed in range(NUM_DECISIONS)], time.process_time
    )
    millions = sum(weights.numel() for weights in base.network.parameters()) / 1e6
    return {
        "decisions_vs_plain": slow,
        "slow_decision_ms": slow_ms,
        "slow_batch_size": size,
        "shipped_decisions_vs_plain": shipped,
        "shipped_decision_cpu_ms": shipped_ms,
        "shipped_parameters_millions": round(millions, 2),
    }


def measure_small_policy() -> dict[str, float]:
    """Return the figures of small policies."""
    torch.set_num_threads(1)
    return measure_first_ratio(make_policy()) | measure_decisions()
