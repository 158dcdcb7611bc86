"""Compare heads that are off with their bases: `python -m benchmarks.steered_policies`.

The last line is JSON:

    off_equals_base_max_diff   largest difference of any token or action between a head that is off and its base,
                               over the shipped OpenVLA-OFT policy, an L1 head and the shipped flow policy, each
                               kind of head, sampled and greedy (0: bit for bit)
    num_decisions              decisions that were compared
    head_ms, base_ms           CPU time of a decision with the head on, and of the base alone, for the shipped
                               OpenVLA-OFT policy in batches of 16

Nothing is trained, so the numbers need no seeds but those of the observations.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from vla_rl.models.example_inputs import example_observation
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, tiny
from vla_rl.models.shipped import BASE_POLICY, FLOW_BASE_POLICY
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.types import Observation, Sampling
from vla_rl.types.observation import DRAWN_KEY

BATCH: Final = 16
NUM_TIMED: Final = 6


class Comparison(NamedTuple):
    """A base and the kinds of heads that it takes."""

    make: Callable[[], Any]
    kinds: tuple[Any, ...]


def _load(folder: object) -> Any:
    return load_policy(str(folder), CheckpointConfig(), "cpu")


COMPARISONS: Final = {
    "OpenVLA-OFT, tokens": Comparison(lambda: _load(BASE_POLICY), ("residual", "tokens")),
    "OpenVLA-OFT, L1": Comparison(
        lambda: ContinuousOpenVlaOft.create(tiny(image_size=56, head="l1"), seed=0), ("residual",)
    ),
    "flow": Comparison(lambda: _load(FLOW_BASE_POLICY), ("residual", "noise")),
}


def make_observations(policy: Any) -> list[Observation]:
    """Return a batch of observations of noise."""
    made = [example_observation(policy, seed) for seed in range(BATCH)]
    return [
        {name: value for name, value in each.items() if name != DRAWN_KEY}
        for each in made
        if each is not None
    ]


def compare_off(make: Callable[[], Any], kind: Any, greedy: bool) -> float:
    """Return the largest difference between a head of that kind that is off and its base, made twice."""
    base = make()
    policy = SteeredPolicy.create(make(), SteeringConfig(kind=kind), seed=0)
    policy.steer(False)
    samplings = [Sampling(seed=seed, greedy=greedy) for seed in range(BATCH)]
    seen = make_observations(base)
    with torch.inference_mode():
        own = policy.sample(policy.prepare(seen), samplings)
        expected = base.sample(base.prepare(seen), samplings)
    assert own.chunk is not None
    wanted = expected.tokens if expected.chunk is None else expected.chunk
    actions = policy.decode(own.chunk.numpy()), base.decode(wanted.numpy())
    differences = [
        np.abs(own.chunk.double().numpy() - wanted.double().numpy()).max(),
        np.abs(actions[0].astype(np.float64) - actions[1].astype(np.float64)).max(),
    ]
    return float(max(differences))


def measure_off_difference() -> dict[str, float]:
    """Return `off_equals_base_max_diff` and `num_decisions`."""
    largest, number = 0.0, 0
    for name, comparison in COMPARISONS.items():
        for kind in comparison.kinds:
            for greedy in (False, True):
                difference = compare_off(comparison.make, kind, greedy)
                print(f"{name}, {kind}, {'greedy' if greedy else 'sampled'}: {difference}")
                largest, number = max(largest, difference), number + BATCH
    return {"off_equals_base_max_diff": largest, "num_decisions": number}


def measure_decisions() -> dict[str, float]:
    """Return the CPU time of a decision with and without a head, in ms."""
    base = _load(BASE_POLICY)
    seen = make_observations(base)
    policy = SteeredPolicy.create(base, SteeringConfig(), seed=0)
    samplings = [Sampling(seed=seed) for seed in range(BATCH)]
    found = {}
    for name, each in {"head_ms": policy, "base_ms": base}.items():
        batch, spent = each.prepare(seen), []
        with torch.inference_mode():
            for _ in range(NUM_TIMED):
                started = time.process_time()
                each.sample(batch, samplings)
                spent.append(time.process_time() - started)
        found[name] = round(1000.0 * min(spent) / BATCH, 3)
    return found


def main() -> int:
    """Measure, and print the result."""
    print(json.dumps({**measure_off_difference(), **measure_decisions()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
