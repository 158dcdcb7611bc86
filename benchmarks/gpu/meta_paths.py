"""Every path that computes, run with its network on the meta device.

    batch on the CPU ─► the product's own engine, learner, critic, ... ─► shapes, and what it asked for

A path passes if it needs no number of the device but at the places of `allowed_waits`.

Keys of the last line:
    meta_paths      number of paths, over all families; each is a test of its own in tests/devices
    meta_failures   paths that fail, or wait at a place that is not allowed; goal 0
"""

import traceback
from functools import cache, partial
from typing import Any, Final

from benchmarks.gpu.computations import (
    act,
    build,
    compare,
    converse,
    embed,
    estimate_values,
    imitate,
    learn,
    publish,
    save,
)
from benchmarks.gpu.crossings import Crossings
from benchmarks.gpu.tiny_policies import FAMILIES, uneven_conversations
from benchmarks.gpu.watched_paths import Path, cross, not_allowed
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.algorithms.losses.config import CorrectionConfig, KlLossConfig
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.types import ReplyOptions
from vla_rl.types.language import JsonFormat


def _recomputed(policy: Any) -> Any:
    policy.recompute_activations()
    return policy


def _in_bfloat16(policy: Any) -> Any:
    policy.network.bfloat16()
    return policy


def _loss_paths() -> dict[str, Path]:
    """Return an update by every loss, with rows in one and in several micro-batches."""
    # nft compares predictions, which only flow policies have
    losses = {name: PolicyLossConfig(name=name) for name in LOSSES if name != "nft"}
    for level in ("action", "chunk", "sequence"):
        losses[f"ppo by {level}"] = PolicyLossConfig(name="ppo", level=level)
    losses["ppo corrected"] = PolicyLossConfig(
        correction=CorrectionConfig(truncate="token", mask="geometric")
    )
    losses["ppo with kl"] = PolicyLossConfig(kl=KlLossConfig(coef=0.1))
    paths: dict[str, Path] = {}
    for name, loss in losses.items():
        for size in (4, 16):
            paths[f"update by {name} in micro-batches of {size}"] = partial(
                learn, family="mlp", loss=loss, micro_batch=size
            )
    return paths


def _paths() -> dict[str, Path]:
    paths: dict[str, Path] = {}
    images = [family for family in FAMILIES if family.startswith("o")]
    for family in FAMILIES:
        if family != "language":
            paths[f"act: {family}"] = partial(act, family=family)
        if family != "oft diffusion":  # it has no likelihood
            paths[f"update: {family}"] = partial(learn, family=family)
            paths[f"reference: {family}"] = partial(compare, family=family)
        if family not in ("oft diffusion", "oft film"):
            for trunk in ("own", "shared"):
                paths[f"critic: {family}, {trunk}"] = partial(
                    estimate_values, family=family, trunk=trunk
                )
        paths[f"imitation: {family}"] = partial(imitate, family=family)
    for family in images:
        if family != "oft diffusion":
            paths[f"build: {family}"] = partial(build, family=family)
    for family in ("oft tokens", "oft adapters", "mlp", "language"):
        paths[f"checkpoint: {family}"] = partial(save, family=family)
    for family in ("openvla", "oft tokens", "oft l1"):
        for name, change in {
            "recomputed": _recomputed,
            "in bfloat16": _in_bfloat16,
            "adapted": lambda policy: policy.adapted(LoraConfig(rank=2), seed=0),
            "merged": lambda policy: policy.adapted(LoraConfig(rank=2), seed=0).merged(),
        }.items():
            paths[f"update: {family}, {name}"] = partial(learn, family=family, change=change)
    paths["update: language, in bfloat16"] = partial(learn, family="language", change=_in_bfloat16)
    paths["publish: oft tokens"] = partial(publish, family="oft tokens")
    paths["update: oft tokens, twice"] = partial(learn, family="oft tokens", updates=2)
    packed = partial(learn, family="language", get_episodes=uneven_conversations, micro_batch=16)
    paths["update: language, packed"] = packed
    paths["update: language, packed, in bfloat16"] = partial(packed, change=_in_bfloat16)
    paths["talk"] = converse
    # one token, because the token that the watch answers is in no grammar
    json = ReplyOptions(format=JsonFormat())
    paths["talk: json"] = partial(converse, options=json, max_tokens=1)
    paths["talk: with alternatives"] = partial(converse, options=ReplyOptions(top_log_probs=2))
    for encoder in ("policy", "vjepa2"):
        paths[f"embed: {encoder}"] = partial(embed, encoder=encoder)
    return paths | _loss_paths()


PATHS: Final = _paths()
"""Paths by name."""


@cache
def crossings_of(name: str) -> Crossings:
    """Return the crossings of a path, which is run once. Raises what the path raises."""
    return cross(PATHS[name])


def figures() -> dict[str, float]:
    """Run all paths; print what fails."""
    num_failures = 0
    for name in PATHS:
        try:
            problem = not_allowed(crossings_of(name))
        except Exception:
            problem = traceback.format_exc()
        if problem:
            num_failures += 1
            print(f"{name} fails:\n{problem}")
    return {"meta_paths": len(PATHS), "meta_failures": num_failures}
