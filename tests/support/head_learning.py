"""A task of one decision for a head over a small MLP, whose rows are made in memory.

The base's chunk is 0. An action earns 1 if its first number is above 0.3, so a head has learnt
something if its mean is; actions in the buffer are uniform.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_rl.engines import DeviceLane
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.off_policy.config import (
    CriticNetworkConfig,
    OffPolicyConfig,
)
from vla_rl.learner.off_policy.learner import OffPolicyLearner
from vla_rl.learner.off_policy.run_replay import RunReplay
from vla_rl.learner.optimizer import OptimizerConfig
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.replay import EpisodeRows, TransitionLayout
from vla_rl.replay.config import RunReplayConfig

REWARDED_FROM = 0.3
BASE = MlpConfig(
    state_size=3, action_low=(-1.0, -1.0), action_high=(1.0, 1.0), num_bins=5, chunk_size=1
)


def make_head(kind: str = "residual", *, learns_std: bool = False, seed: int = 0) -> SteeredPolicy:
    """Return a head over an MLP whose likeliest action is 0 everywhere."""
    base = MlpPolicy.create(BASE, seed=0)
    with torch.no_grad():
        base.network.head.bias.unflatten(0, (BASE.num_tokens, BASE.num_bins))[:, 2] = 1.0
    settings: dict[str, Any] = {"kind": kind, "scale": (1.0,)} if kind == "residual" else {}
    config = SteeringConfig(
        hidden=(32,), learns_std=learns_std, std=0.3, **(settings or {"kind": kind})
    )
    return SteeredPolicy.create(base, config, seed=seed)


def make_decisions(
    policy: SteeredPolicy, layout: TransitionLayout, count: int, first: int = 0
) -> list[EpisodeRows]:
    """Return episodes of one decision with uniform actions, as the policy would have recorded them."""
    numbers = np.random.default_rng(first)
    states = numbers.normal(size=(count, BASE.state_size)).astype(np.float32)
    seen = policy.describe_states([{"state": state} for state in states])
    limit = 1.0
    actions = numbers.uniform(-limit, limit, (count, layout.action)).astype(np.float32)
    episodes = []
    for number in range(count):
        rows = layout.make_empty_rows(1)
        for name, values in seen.items():
            rows[name] = values[number]
        rows["action"] = actions[number]
        is_success = bool(actions[number, 0] > REWARDED_FROM)
        rows["rewards"][0, 0] = rows["return_to_go"] = float(is_success)
        rows["num_rewards"] = rows["steps_to_end"] = 1
        rows["terminated"], rows["is_success"] = True, is_success
        rows["episode"] = first + number
        rows["has_expert"] = number % 2
        rows["expert_action"] = 0.6 * (number % 2)
        episodes.append(EpisodeRows(episode_id=first + number, task="bandit", rows=rows))
    return episodes


@contextmanager
def opened_learner(
    policy: SteeredPolicy,
    lane: DeviceLane,
    folder: Path,
    publish_to: Sequence[WeightSink] = (),
    stored: RunReplayConfig | None = None,
    **settings: Any,
) -> Iterator[OffPolicyLearner]:
    """Make a learner of the task with a buffer of 256 decisions in `folder`; `stored` has its settings."""
    small = CriticNetworkConfig(
        hidden=(32,), tau=0.05, optimizer=OptimizerConfig(lr=3e-3, warmup_steps=0)
    )
    defaults: dict[str, Any] = {
        "batch": 64,
        "critic_first_steps": 50,
        "actor": OptimizerConfig(lr=3e-3, warmup_steps=0),
        "critic": small,
    }
    replay = RunReplay(policy.layout, stored or RunReplayConfig())
    learner = OffPolicyLearner(
        policy,
        lane,
        OffPolicyConfig(**(defaults | settings)),
        replay,
        describe_states=policy.describe_states,
        publish_to=publish_to,
        encode_action=lambda chunk: policy.encode(chunk[None])[0],
        seed=7,
    )
    with replay.opened(folder) as buffer:
        buffer.append(make_decisions(policy, replay.layout, 256))
        yield learner


def mean_action(policy: SteeredPolicy) -> np.ndarray:
    """Return the greedy actions of unseen states, float32 [64, A]."""
    states = np.random.default_rng(9).normal(size=(64, BASE.state_size)).astype(np.float32)
    seen = policy.describe_states([{"state": state} for state in states])
    with torch.no_grad():
        found = policy.network.distribution(
            *(torch.from_numpy(seen[name]) for name in ("features", "proprio", "reference"))
        )
    values: np.ndarray = found.mode.numpy()
    return values
