"""Compare the log-probs that acting reports with a learner's, and batches of decisions with single ones.

Both use a small flow policy of LIBERO's size: two cameras of 84 pixels, a state, chunks of 8 x 7 numbers.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.prismatic.action_tokens import unit_bounds
from vla_rl.types import Observation, Sampling, with_drawn

NUM_DECISIONS: Final = 16
NUM_ROUNDS: Final = 3

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


def make_policy() -> FlowPolicy:
    """Create the policy; the layers that begin at 0 get weights of the size that training gives them."""
    policy = create_small_flow(SHAPE, seed=0)
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


def measure_decisions(policy: FlowPolicy) -> dict[str, float]:
    """Return how many times as fast 16 decisions are in one batch as one after another, in CPU time.

    Rounds of both alternate; the fastest of each counts, because others use the machine too.
    """
    seen = make_observations(NUM_DECISIONS)
    together, alone = [], []
    for _ in range(NUM_ROUNDS):
        began = time.process_time()
        sample(policy, seen, 0)
        between = time.process_time()
        for row, each in enumerate(seen):
            sample(policy, [each], row)
        together.append(between - began)
        alone.append(time.process_time() - between)
    millions = sum(weights.numel() for weights in policy.network.parameters()) / 1e6
    return {
        "decisions_vs_plain": min(alone) / min(together),
        "decision_ms": 1e3 * min(together) / NUM_DECISIONS,
        "parameters_millions": round(millions, 2),
    }


def measure_small_policy() -> dict[str, float]:
    """Return the figures of the small policy."""
    torch.set_num_threads(1)
    policy = make_policy()
    return measure_first_ratio(policy) | measure_decisions(policy)
