"""Episodes and groups of a few decisions, made up or by an MLP policy in a world with numbers for states."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Group,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)


def trajectory(
    rewards: list[list[float]],
    number: int = 0,
    stop: StopReason = StopReason.TERMINATED,
    info: dict[str, Any] | None = None,
) -> Trajectory:
    """One decision for each list of rewards.

    Chunks of two control steps with one token each, of log-prob -1.
    """
    steps = tuple(
        Step(
            observation={},
            chunk=ActionChunk(
                actions=np.zeros((2, 1), np.float32),
                tokens=np.zeros(2, np.int64),
                log_probs=np.full(2, -1.0, np.float32),
                weight_version=0,
            ),
            rewards=np.array(executed, np.float32),
        )
        for executed in rewards
    )
    spec = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=number,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec, steps=steps, final_observation={}, stop_reason=stop, info=info or {}
    )


def make_group(*members: Trajectory) -> Group:
    return Group(group_id=0, trajectories=members, dispatch_version=0)


PAIR = make_group(trajectory([[1.0, 2.0], [4.0]], 0), trajectory([[0.5]], 1, StopReason.SUCCESS))


SILENT = make_group(trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.TIME_LIMIT))
"""Episodes of an environment whose infos never have `is_success`."""


def as_greedy(sampled: Trajectory) -> Trajectory:
    greedy = msgspec.structs.replace(sampled.episode.sampling, greedy=True)
    episode = msgspec.structs.replace(sampled.episode, sampling=greedy)
    return msgspec.structs.replace(sampled, episode=episode)


def shared(
    number: int, *turns: tuple[str, float], stop: StopReason = StopReason.TERMINATED
) -> Trajectory:
    """An episode of several agents: who decided, and what that earned."""
    alone = trajectory([[earned] for _, earned in turns], number, stop)
    steps = tuple(
        msgspec.structs.replace(step, agent=agent)
        for step, (agent, _) in zip(alone.steps, turns, strict=True)
    )
    return msgspec.structs.replace(alone, steps=steps)


SHARED = make_group(
    shared(0, ("solver", 0.0), ("checker", 1.0), ("solver", 1.0)),
    shared(1, ("solver", 0.0), ("checker", 0.5)),
    shared(2, ("solver", 0.5)),
)


SHAPE = MlpConfig(
    state_size=2, action_low=(-1.0,), action_high=(1.0,), num_bins=5, chunk_size=2, hidden=(16,)
)


def mlp(seed: int = 0) -> MlpPolicy:
    return MlpPolicy.create(SHAPE, seed)


def state(*numbers: float) -> Observation:
    return {"state": np.array(numbers, np.float32)}


def run_policy(
    policy: MlpPolicy,
    seed: int,
    observations: Sequence[Observation],
    stop_reason: StopReason = StopReason.TERMINATED,
    weight_version: int = 0,
) -> Trajectory:
    """What the policy chose for all but the last observation.

    Every chunk ran whole, and each decision earned 1.
    """
    seen = list(observations[:-1])
    samplings = [Sampling(seed=derive_seed(seed, index)) for index in range(len(seen))]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(seen), samplings)
        tokens, log_probs = sampled.tokens, sampled.log_probs
    actions = policy.decode(tokens.numpy())
    steps = tuple(
        Step(
            observation=observation,
            chunk=ActionChunk(
                actions=actions[index],
                tokens=tokens[index].numpy(),
                log_probs=log_probs[index].numpy(),
                weight_version=weight_version,
            ),
            rewards=np.full(policy.config.chunk_size, 1.0 / policy.config.chunk_size, np.float32),
        )
        for index, observation in enumerate(seen)
    )
    episode = EpisodeSpec(
        episode_id=seed,
        group_id=0,
        member=seed,
        env=EnvSpec(id="none"),
        task="none",
        seed=seed,
        policy_seed=seed,
    )
    return Trajectory(
        episode=episode,
        steps=steps,
        final_observation=observations[-1],
        stop_reason=stop_reason,
        info={},
    )


def walk(policy: MlpPolicy, seed: int, num_steps: int, **kinds: object) -> Trajectory:
    """A trajectory over random states."""
    rng = np.random.default_rng(seed)
    trajectory = run_policy(
        policy, seed, [state(*rng.normal(size=2)) for _ in range(num_steps + 1)]
    )
    return msgspec.structs.replace(trajectory, **kinds)
