"""Frozen bases of every supported family, observations for each, and heads over them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from small_flow import observe as observe_flow, tiny_policy
from small_policies import observe as observe_images, oft_policy

from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, tiny
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.types import Observation

MLP = MlpConfig(
    state_size=3, action_low=(-2.0, 0.0), action_high=(2.0, 1.0), num_bins=5, chunk_size=2
)


def observe_state(seed: int) -> Observation:
    """Return a state of three numbers."""
    return {"state": np.random.default_rng(seed).normal(size=3).astype(np.float32)}


class Family(NamedTuple):
    """A family of bases: how one is made from a seed, and what it observes for a seed."""

    make: Callable[[int], Any]
    observe: Callable[[int], Observation]


def _sharp_mlp(seed: int) -> MlpPolicy:
    """Make an MLP whose choices depend on its state: a new one is nearly uniform."""
    policy = MlpPolicy.create(MLP, seed)
    with torch.no_grad():
        policy.network.head.weight.mul_(200.0)
    return policy


BASES: dict[str, Family] = {
    "mlp": Family(_sharp_mlp, observe_state),
    "oft_tokens": Family(oft_policy, observe_images),
    "oft_l1": Family(
        lambda seed: ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1"), seed),
        observe_images,
    ),
    "flow": Family(tiny_policy, observe_flow),
}

KINDS = [
    *((family, "residual") for family in BASES),
    ("flow", "noise"),
    ("mlp", "tokens"),
    ("oft_tokens", "tokens"),
]
"""Every family with each kind of head that it takes."""


def make_steered(family: str, kind: str = "residual", **settings: Any) -> SteeredPolicy:
    """Make a head over a base of seed 0, whose mean depends on its inputs: a new one corrects nothing."""
    config = SteeringConfig(kind=kind, hidden=(32,), **settings)  # type: ignore[arg-type]
    policy = SteeredPolicy.create(BASES[family].make(0), config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        policy.network.mean.weight.add_(
            0.3 * torch.randn(policy.network.mean.weight.shape, generator=generator)
        )
    return policy


def write_head(folder: Path) -> None:
    """Write a head over an MLP to a folder, and the MLP beside it."""
    base = folder.with_name(f"{folder.name}-base")
    BASES["mlp"].make(0).save(base)
    frozen = load_base(str(base), AS_STORED, torch.device("cpu"))
    SteeredPolicy.create(frozen, SteeringConfig(hidden=(16,)), seed=0).save(folder)
