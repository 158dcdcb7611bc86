"""Compare off-policy losses with what other projects' code gave on the same numbers.

Networks are tiny, their weights follow from a formula or are stored beside the results
(`tests/algorithms/golden`, whose README says what was executed). Compared are losses and gradients.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from benchmarks.golden_networks import (
    GoldenWeights,
    formula_weight,
    load_arrays,
    relative_difference,
)
from benchmarks.off_policy_peers import compare_d3rlpy, compare_stable_baselines
from vla_rl.algorithms import off_policy

RAMP: Final = {0: (7.0, 0.05), 99: (7.0, 0.05), 100: (6.979, 0.05225), 150: (5.929, 0.16475)} | {
    299: (2.8, 0.5),
    1000: (2.8, 0.5),
}
"""RLinf's weights (BC, Q) by update, warm-up 100, ramp 200."""


def golden_max_rel() -> float:
    """Return the largest relative difference over all projects, losses and gradients."""
    return max(golden_differences().values())


def golden_differences() -> dict[str, float]:
    """Return the relative difference of every loss and gradient by `project/name`.

    It is the largest absolute difference over a tensor, divided by the tensor's largest entry.
    """
    return {
        f"{project}/{name}": difference
        for project, compare in PROJECTS.items()
        for name, difference in compare().items()
    }


def compare_rlt() -> dict[str, float]:
    """Compare with RLinf's RLT: chunk reward, actor, critic, actor's loss by each reduction, ramp."""
    golden = load_arrays("rlt_rlinf")
    online, target = RltNetworks(0.0), RltNetworks(0.9)
    state, following = (
        torch.cat([golden[f"in_z{end}"], golden[f"in_proprio{end}"]], dim=1)
        for end in ("", "_next")
    )
    reference, next_reference = golden["in_ref"].flatten(1), golden["in_ref_next"].flatten(1)
    num_rewards = torch.full((len(state),), golden["in_rewards"].shape[1])
    returns = off_policy.chunk_returns(golden["in_rewards"], num_rewards, gamma=0.99)
    next_action = target.act(following, next_reference)
    targets = off_policy.td_targets(
        returns,
        off_policy.bootstrap_discounts(num_rewards, gamma=0.99),
        golden["in_terminations"].any(dim=1),
        off_policy.reduce_critics(target.evaluate(following, next_action)),
    )
    values = online.evaluate(state, golden["in_actions"])
    loss = off_policy.td_loss(values, targets)
    found = {"chunk_reward": returns[:, None], "q": values.T, "critic_loss": loss}
    critics = {name: each for name, each in online.parameters.items() if name.startswith("q_head.")}
    gradients = torch.autograd.grad(loss, list(critics.values()))
    found |= {f"critic_grad/{name}": each for name, each in zip(critics, gradients, strict=True)}
    action = online.act(state, reference)
    found["actor"] = action
    intervened = golden["in_intervened"].flatten(1)
    aims = off_policy.cloning_targets(reference, golden["in_actions"], intervened)
    # RLinf reports the mean over all numbers, and those over numbers of the reference and of a human
    found["bc"] = torch.stack(
        [
            off_policy.imitation_errors(action[part][None], aims[part][None]).mean()
            for part in (torch.ones_like(intervened), ~intervened, intervened)
        ]
    )
    errors = off_policy.imitation_errors(action, aims)
    last = online.parameters["actor.mlp.net.4.bias"]
    reductions: dict[str, off_policy.Reduction] = {"min": "min", "q1": "first", "mean": "mean"}
    for name, reduction in reductions.items():
        value = off_policy.reduce_critics(online.evaluate(state, action), reduction)
        actor_loss = off_policy.value_and_cloning_loss(
            value, errors, off_policy.LossWeights(bc=2.8, q=0.5)
        )
        found[f"actor_loss_{name}"] = actor_loss
        (found[f"actor_grad_last_{name}"],) = torch.autograd.grad(
            actor_loss, last, retain_graph=True
        )
    differences = {
        name: relative_difference(value, golden[f"out_{name}"]) for name, value in found.items()
    }
    ramped = [
        off_policy.ramp_weights(
            update,
            first=off_policy.LossWeights(7.0, 0.05),
            last=off_policy.LossWeights(2.8, 0.5),
            warmup_updates=100,
            ramp_updates=200,
        )
        for update in RAMP
    ]
    return differences | {
        "ramp": relative_difference(torch.tensor(ramped), torch.tensor(list(RAMP.values())))
    }


class RltNetworks:
    """RLT's actor and twin critic in RLinf, with weights by the golden files' formula."""

    LAYERS: Final = ("net.0", "net.2", "net.4")
    WIDTHS: Final = {"actor.mlp": 35, "q_head.q1.mlp": 1, "q_head.q2.mlp": 1}

    def __init__(self, phase: float) -> None:
        self.parameters: dict[str, Tensor] = {}
        for network, width in self.WIDTHS.items():
            for layer, shape in zip(self.LAYERS, ((16, 51), (16, 16), (width, 16)), strict=True):
                for part, size in (("weight", shape), ("bias", shape[:1])):
                    name = f"{network}.{layer}.{part}"
                    self.parameters[name] = formula_weight(name, size, phase).requires_grad_()

    def act(self, state: Tensor, reference: Tensor) -> Tensor:
        """Return the greedy action: float32 [B, 35]."""
        return self._apply("actor.mlp", torch.cat([state, reference], dim=1)).clamp(-1.0, 1.0)

    def evaluate(self, state: Tensor, action: Tensor) -> Tensor:
        """Return both critics' values: float32 [2, B]."""
        seen = torch.cat([state, action], dim=1)
        return torch.stack([self._apply(f"q_head.{q}.mlp", seen)[:, 0] for q in ("q1", "q2")])

    def _apply(self, network: str, inputs: Tensor) -> Tensor:
        weights = GoldenWeights(self.parameters)
        return weights.apply([f"{network}.{layer}" for layer in self.LAYERS], inputs)


PROJECTS: Final[Mapping[str, Callable[[], dict[str, float]]]] = {
    "rlt": compare_rlt,
    "sb3": compare_stable_baselines,
    "d3rlpy": compare_d3rlpy,
}
"""Comparisons by project."""
