"""Whether the device computes what the CPU does, for a small policy of every family.

    the CPU's float32 ─┬─ the device's float32    log-probs, gradients, choices: equal but for rounding
                       ├─ the device's bfloat16   no further away than the CPU's bfloat16, times two
                       ├─ CUDA graphs             as kernels that are launched one by one
                       └─ compiled blocks         as uncompiled ones; of one family, because the
                                                  others have the same blocks

Keys:
    checked, num_wrong, wrong   comparisons that were made, and those that failed
    families                    largest differences by family
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.campaign.target import Target
from benchmarks.gpu.tiny_policies import FAMILIES, demonstrated, observation, policy_on_host
from vla_rl.engines.cuda_graphs import ReplayedModel
from vla_rl.engines.device_lane import to_host
from vla_rl.learner.scoring import move_choices
from vla_rl.types import Sampling

FLOAT32_LIMIT: Final = 1e-3
"""Largest difference of a log-prob or an action, and relative one of a gradient."""

BFLOAT16_FACTOR: Final = 2.0
BFLOAT16_MARGIN: Final = 0.02

PACKED: Final = "packed log-probs"
ONE_LENGTH: Final = "log-probs of one length"

PROMPT_LENGTHS: Final = (60, 9, 3, 17)
"""Prompts so different that a language policy reads them on one line."""

COMPILED_FAMILY: Final = "oft adapters"
"""The family whose blocks are compiled: with adapters, as a 7B is trained."""

ROW_COUNTS: Final = (1, 3, 5)
"""Rows of replayed batches; 3 and 5 are padded."""


def measure(target: Target) -> Iterator[tuple[str, object]]:
    """Compare every family."""
    # patches are embedded by a convolution, which would be rounded to TF32
    torch.backends.cudnn.allow_tf32 = False
    wrong: list[str] = []
    families: dict[str, dict[str, float]] = {}
    checked = 0
    for family in FAMILIES:
        families[family] = found = compare(target, family)
        checked += len(found)
        wrong += [f"{family}: {name}" for name in found if not is_right(name, found)]
        yield "families", families
        yield "checked", checked
        yield "wrong", wrong
        yield "num_wrong", len(wrong)

    families["compiled"] = found = compiled_difference(target)
    wrong += [f"compiled: {name}" for name in found if not is_right(name, found)]
    yield "families", families
    yield "checked", checked + len(found)
    yield "wrong", wrong
    yield "num_wrong", len(wrong)


def compare(target: Target, family: str) -> dict[str, float]:
    """Return differences between CPU and device by name."""
    host = policy_on_host(family).copy()
    device = policy_on_host(family).copy()
    device.network.to(target.device)
    expected, actual = computed(host, family), computed(device, family)
    found = {f"float32 {name}": difference(expected[name], actual[name]) for name in expected}
    if isinstance(device, ReplayedModel) and target.is_gpu:
        found["graphs"] = replayed_difference(device, family)
    if family == "mlp":  # which is float32 always
        return found
    for device_name, policy in (("CPU", host), ("device", device)):
        policy.network.bfloat16()
        rounded = computed(policy, family)
        for name in expected.keys() & {"log-probs", ONE_LENGTH, PACKED}:
            of_which = "" if name == "log-probs" else f", {name}"
            key = f"bfloat16 on the {device_name}{of_which}"
            found[key] = difference(expected[name], rounded[name])
    return found


def is_right(name: str, found: Mapping[str, float]) -> bool:
    """Return whether a difference is rounding; one that is not a number is not."""
    if name.startswith("bfloat16 on the CPU"):
        return True
    if name.startswith("bfloat16 on the device"):
        on_cpu = found[name.replace("device", "CPU")]
        return found[name] <= BFLOAT16_FACTOR * on_cpu + BFLOAT16_MARGIN
    return found[name] <= FLOAT32_LIMIT


def computed(policy: Any, family: str) -> dict[str, Tensor]:
    """Return what a policy computes of three rows, on the host and in float32."""
    rows = [observation(family, number) for number in range(3)]
    results = dict[str, Tensor]()
    if family != "oft diffusion":  # it has no likelihood
        results["log-probs"], results["gradients"] = learnt(policy, family, rows)
        if family.startswith("o"):  # other attention kernels: nothing is padded, no mask is made
            alike = [observation(family, number) for number in range(0, 6, 2)]
            results[ONE_LENGTH], results["gradients of one length"] = learnt(policy, family, alike)
    if family == "language":
        results[PACKED] = packed_log_probs(policy)
    else:
        results["actions"] = acted(policy, rows)
    return {name: result.float().cpu() for name, result in results.items()}


def learnt(policy: Any, family: str, rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Return log-probs of three rows, and the gradient of all weights."""
    tokens = torch.from_numpy(policy.encode(demonstrated(family)[None].repeat(3, 0)))
    if family == "language":
        tokens = torch.from_numpy(demonstrated(family).repeat(3, 0))
    batch = policy.prepare(rows)
    log_probs, _ = policy.log_probs(batch, *move_choices(policy, tokens, torch.ones(3)))
    torch.autograd.backward(log_probs.sum())
    gradients = [
        parameter.grad.flatten().float()
        for parameter in policy.network.parameters()
        if parameter.grad is not None
    ]
    policy.network.zero_grad()
    return log_probs.detach(), torch.cat(gradients)


def packed_log_probs(policy: Any) -> Tensor:
    """Return log-probs of rows that are read end to end: by one kernel on a GPU, in bfloat16."""
    prompts = [{"prompt_tokens": np.arange(5, 5 + length)} for length in PROMPT_LENGTHS]
    tokens = torch.tensor([[20, 21]] * len(prompts))
    with torch.no_grad():
        log_probs, _ = policy.log_probs(
            policy.prepare(prompts), *move_choices(policy, tokens, torch.ones(len(prompts)))
        )
    found: Tensor = log_probs
    return found


def acted(policy: Any, rows: list[Any]) -> Tensor:
    """Return the numbers of greedy actions, float32 on the host."""
    samplings = [Sampling(seed=number, greedy=True) for number in range(len(rows))]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(rows), samplings)
        tokens, log_probs = sampled.tokens, sampled.log_probs
        tokens, log_probs = to_host(tokens, log_probs.float())
    # at rows of equal likelihood rounding decides about the token, and hardly changes its log-prob
    return log_probs if tokens.dtype == torch.int64 else tokens.float()


def replayed_difference(policy: Any, family: str) -> float:
    """Return the largest difference between replayed graphs and kernels."""
    differences = []
    batches = [[observation(family, seed) for seed in range(rows)] for rows in ROW_COUNTS]
    expected = [acted(policy, rows) for rows in batches]
    policy.replay_acting(True)
    for _ in range(2):  # recorded, and replayed
        replayed = [acted(policy, rows) for rows in batches]
        differences += [difference(*pair) for pair in zip(expected, replayed, strict=True)]
    policy.replay_acting(False)
    return max(differences)


def compiled_difference(target: Target) -> dict[str, float]:
    """Return differences between compiled and uncompiled blocks by name."""
    policy = policy_on_host(COMPILED_FAMILY).copy()
    policy.network.to(target.device)
    expected = computed(policy, COMPILED_FAMILY)
    policy.compile_blocks()
    actual = computed(policy, COMPILED_FAMILY)
    return {f"float32 {name}": difference(expected[name], actual[name]) for name in expected}


def difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference of numbers, or the relative one of a long vector."""
    if expected.ndim == 1:
        return float((expected - actual).norm() / expected.norm())
    return float((expected - actual).abs().max())
