"""An MLP policy and trajectories of a world with numbers for states."""

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)

SHAPE = MlpConfig(
    state_size=2, action_low=(-1.0,), action_high=(1.0,), num_bins=5, chunk_size=2, hidden=(16,)
)


def mlp(seed: int = 0) -> MlpPolicy:
    return MlpPolicy.create(SHAPE, seed)


def state(*numbers: float) -> Observation:
    return {"state": np.array(numbers, np.float32)}


def played(
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
        tokens, log_probs = policy.sample(policy.prepare(seen), samplings)
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
    trajectory = played(policy, seed, [state(*rng.normal(size=2)) for _ in range(num_steps + 1)])
    return msgspec.structs.replace(trajectory, **kinds)
