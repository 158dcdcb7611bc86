"""The peer of the policy benchmarks computes the same numbers, so that its time is the time of the
same work.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.learner_step import make_trajectories
from benchmarks.plain_policy import PlainPolicy
from vla_rl.models.openvla_oft import OpenVlaOft, tiny

MakeObservation = Callable[..., dict[str, Any]]


def test_the_plain_policy_gives_the_same_logits(make_observation: MakeObservation) -> None:
    policy = OpenVlaOft.create(tiny(image_size=28), seed=0)
    plain = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    observations = [make_observation(seed) for seed in range(3)]
    with torch.no_grad():
        expected = policy.network(policy.prepare(observations))
        found = plain.action_logits(plain.pixels(observations), observations)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_the_plain_update_leaves_the_gradient_of_the_clipped_surrogate() -> None:
    policy = OpenVlaOft.create(tiny(image_size=28), seed=0)
    plain = PlainPolicy(policy.config, policy.network, policy.tokenizer)
    trajectories = make_trajectories(policy, num=2, mean_steps=16)
    advantages = [1.0, -0.5]
    plain.update(trajectories, advantages, num_chunks=4)
    found = policy.network.projector.fc3.weight.grad
    assert found is not None
    found = found.clone()
    policy.network.zero_grad()
    num_tokens = sum(len(trajectory.steps) for trajectory in trajectories) * 56
    for trajectory, advantage in zip(trajectories, advantages, strict=True):
        batch = policy.prepare([step.observation for step in trajectory.steps])
        tokens = torch.from_numpy(np.stack([step.chunk.tokens for step in trajectory.steps]))
        log_probs, _ = policy.log_probs(batch, tokens, torch.ones(len(tokens)))
        # at a ratio of 1 the surrogate's gradient is that of -A log p
        torch.autograd.backward(-advantage * log_probs.sum() / num_tokens)
    torch.testing.assert_close(
        found, policy.network.projector.fc3.weight.grad, atol=1e-6, rtol=1e-3
    )
