"""Batches of tokens, outcomes, trajectories that are small enough to follow; gradients by finite differences."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms import AdvantageConfig, Advantages, RewardBatch, advantage_estimator
from vla_rl.algorithms.losses import PolicyLoss, PolicyLossConfig, TokenBatch, policy_loss
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory


def row(*values: float) -> Tensor:
    """float64 [1, T]."""
    return torch.tensor([values], dtype=torch.float64)


def ratios_of(*values: float) -> Tensor:
    """Log-probs whose ratio to a behavior policy of log-prob 0 is this: float64 [1, T]."""
    return row(*(math.log(value) for value in values))


def batch_of(ratios: tuple[float, ...], advantages: tuple[float, ...], **others: Any) -> TokenBatch:
    """One row with these ratios and advantages, all unmasked unless said otherwise."""
    mask = others.pop("mask", torch.ones(1, len(ratios), dtype=torch.bool))
    return TokenBatch(
        log_prob=ratios_of(*ratios).requires_grad_(),
        behavior_log_prob=torch.zeros(1, len(ratios), dtype=torch.float64),
        advantage=row(*advantages),
        mask=mask,
        **others,
    )


def random_batch(
    rows: int = 4, tokens: int = 6, seed: int = 0, spread: float = 0.3, **others: Any
) -> TokenBatch:
    """Log-probs around -1, ratios around 1, advantages of both signs, a fifth of the tokens masked;
    float64.

    The first token of every row is unmasked; `others` replaces or adds fields.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    behavior = -1.0 + 0.5 * normal()
    mask = torch.rand(rows, tokens, generator=generator) < 0.8
    mask[:, :1] = True
    fields: dict[str, Any] = {
        "log_prob": (behavior + spread * normal()).requires_grad_(),
        "behavior_log_prob": behavior,
        "advantage": normal(),
        "mask": mask,
        "proximal_log_prob": behavior + 0.5 * spread * normal(),
        "reference_log_prob": behavior + spread * normal(),
        "action_tokens": 2 if tokens % 2 == 0 else None,
    }
    return TokenBatch(**(fields | others))


def loss_of(name: str, **changes: Any) -> PolicyLoss:
    """Return the loss of this name, with these parameters and the defaults of the others."""
    return policy_loss(PolicyLossConfig(name=name, **changes))


def covariance_batch() -> TokenBatch:
    """Log-probs -3, -1, -1, -3 and advantages -1, 1, -1, 1: covariances 1, 1, -1, -1.

    All ratios are 1.
    """
    log_prob = row(-3.0, -1.0, -1.0, -3.0)
    return TokenBatch(
        log_prob=log_prob.clone().requires_grad_(),
        behavior_log_prob=log_prob,
        advantage=row(-1.0, 1.0, -1.0, 1.0),
        mask=torch.ones(1, 4, dtype=torch.bool),
    )


def probabilities(
    current: tuple[float, ...], acted: tuple[float, ...], advantages: tuple[float, ...]
) -> TokenBatch:
    """Return one row of tokens with these probabilities now and under the policy that acted."""
    return TokenBatch(
        log_prob=ratios_of(*current).requires_grad_(),
        behavior_log_prob=ratios_of(*acted),
        advantage=row(*advantages),
        mask=torch.ones(1, len(current), dtype=torch.bool),
    )


def gradient(loss: PolicyLoss, batch: TokenBatch) -> Tensor:
    """d sum(losses) / d log_prob: float64 [B, T]."""
    losses, _ = loss(batch)
    (result,) = torch.autograd.grad(losses.sum(), batch.log_prob)
    return result


def finite_differences(
    function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6
) -> Tensor:
    """The gradient of a scalar function by central differences."""
    point = at.detach().clone()
    result = torch.zeros_like(point)
    for index in range(point.numel()):
        ends = []
        for sign in (1.0, -1.0):
            moved = point.clone()
            moved.view(-1)[index] += sign * step
            ends.append(float(function(moved)))
        result.view(-1)[index] = (ends[0] - ends[1]) / (2.0 * step)
    return result


OF_GROUPS = [
    "grpo",
    "dr_grpo",
    "max_rl",
    "rloo",
    "pass_at_k",
    "gpg",
    "cpgd_filter",
    "opo",
    "reinforce_plus_plus_baseline",
]


def estimate(name: str, batch: RewardBatch, **changes) -> Advantages:
    return advantage_estimator(AdvantageConfig(name=name, **changes))(batch)


def outcomes(rewards: list[float], group: list[int], **others) -> RewardBatch:
    fields = {
        "num_tokens": np.ones(len(rewards)),
        "greedy_rewards": np.zeros(len(rewards)),
    } | others
    return RewardBatch(
        rewards=np.array(rewards, dtype=np.float64), group=np.array(group, dtype=np.int64), **fields
    )


def column(made: Advantages) -> list[float]:
    assert made.advantage.dtype == np.float32
    assert made.advantage.shape[1] == 1
    return made.advantage[:, 0].tolist()


def trajectory_of(
    observations: list[dict[str, Any]],
    episode_id: int = 0,
    frames: list[np.ndarray | None] | None = None,
    frames_key: str | None = "image",
) -> Trajectory:
    """`frames`: for each decision the frames of `frames_key` that its step kept, uint8 [n, S, S,
    3], or None.
    """
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    kept = frames or [None] * (len(observations) - 1)
    steps = tuple(
        Step(
            observation=seen,
            chunk=chunk,
            rewards=np.zeros(1, np.float32),
            frames=of_step,
            frames_key=frames_key,
        )
        for seen, of_step in zip(observations[:-1], kept, strict=True)
    )
    spec = EpisodeSpec(
        episode_id=episode_id,
        group_id=0,
        member=0,
        env=EnvSpec(id="toy"),
        task="t",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec,
        steps=steps,
        final_observation=observations[-1],
        stop_reason=StopReason.TIME_LIMIT,
    )


def with_states(*states: float, episode_id: int = 0) -> Trajectory:
    """One number as the state of every observation."""
    return trajectory_of([{"state": np.array([s], np.float32)} for s in states], episode_id)


def with_frames(num: int, size: int = 24, seed: int = 0, episode_id: int = 0) -> Trajectory:
    """Random images of `size` pixels, as many as observations."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 256, (num, size, size, 3), dtype=np.uint8)
    return trajectory_of([{"image": frame} for frame in frames], episode_id)
