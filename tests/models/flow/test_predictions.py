"""A flow policy's predictions: at the weights that acted they are what acted, and losses train by them."""

from typing import Any

import numpy as np
import pytest
import torch
from small_flow import observe, run_episodes, tiny_policy
from torch import Tensor

from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.types import Sampling, with_drawn

NUM = 6

ADVANTAGES = [1.0, -1.0, 0.5]


def act(policy: FlowPolicy) -> tuple[Any, Tensor, Tensor]:
    """Return a batch to be scored, its tokens and their log-probs."""
    seen = [observe(seed) for seed in range(NUM)]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(seen), [Sampling(seed=row) for row in range(NUM)])
    rows = [
        with_drawn(each, {name: found[row].numpy() for name, found in sampled.drawn.items()})
        for row, each in enumerate(seen)
    ]
    return policy.prepare(rows), sampled.tokens.clone(), sampled.log_probs.clone()


@pytest.mark.parametrize("noise_level", [0.5, 0.0])
@pytest.mark.parametrize("predicts", ["next_state", "actions"])
def test_the_weights_that_acted_predict_what_acted(noise_level: float, predicts: Any) -> None:
    policy = tiny_policy(noise_level=noise_level)
    batch, tokens, log_probs = act(policy)
    found = policy.predict(batch, tokens, torch.ones(NUM), predicts)
    torch.testing.assert_close(found.prediction, found.behavior_prediction, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(found.log_probs, log_probs, atol=1e-5, rtol=0.0)
    own, entropies = policy.log_probs(batch, tokens, torch.ones(NUM))
    assert torch.equal(found.log_probs, own)
    assert torch.equal(found.entropy, entropies)
    assert bool((found.step_std > 0.0).all()) == (noise_level > 0.0)
    if predicts == "next_state":
        assert torch.equal(found.reached, tokens)
    else:
        assert torch.equal(found.reached, batch.end)


@pytest.mark.parametrize("predicts", ["next_state", "actions"])
def test_a_prediction_is_linear_in_the_velocity(predicts: Any) -> None:
    policy = tiny_policy()
    batch, tokens, _ = act(policy)
    found = policy.predict(batch, tokens, torch.ones(NUM), predicts)
    assert batch.velocity is not None
    moved = type(batch)(**{**vars(batch), "velocity": batch.velocity + 1.0})
    other = policy.predict(moved, tokens, torch.ones(NUM), predicts)
    change = other.behavior_prediction - found.behavior_prediction
    expected = found.velocity_weight.expand_as(change)
    torch.testing.assert_close(change, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "noise_level"),
    [
        (PolicyLossConfig(), 0.5),
        (PolicyLossConfig(name="nft"), 0.5),
        (PolicyLossConfig(name="nft", form="mse", predicts="actions"), 0.0),
    ],
    ids=["ppo", "nft", "nft of actions without noise"],
)
async def test_a_learner_trains_a_flow_policy(
    loss: PolicyLossConfig, noise_level: float, lane: DeviceLane
) -> None:
    policy = tiny_policy(noise_level=noise_level)
    episodes = await run_episodes(policy, lane)
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=0)
    config = LearnerConfig(loss=loss, optimizer=optimizer, micro_batch=2, stop_kl=100.0)
    before = [each.detach().clone() for each in policy.network.parameters()]
    report = await Learner(policy, lane, config).update(episodes, ADVANTAGES)
    assert report.metrics["update/trained"] == 1.0
    assert report.metrics["update/log_prob_gap_max"] < 1e-5
    assert np.isfinite(report.metrics["update/grad_norm"])
    after = list(policy.network.parameters())
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))


async def test_a_ratio_of_a_chain_without_noise_is_refused(lane: DeviceLane) -> None:
    policy = tiny_policy().with_sampling(FlowSampling(noise_level=0.0))
    with pytest.raises(
        ConfigError, match=r"FlowPolicy chooses without noise: its noise level is 0"
    ):
        Learner(policy, lane, LearnerConfig())
    exact = PolicyLossConfig(kl=KlLossConfig(coef=0.1, estimator="exact"))
    with pytest.raises(ConfigError, match="noise level is 0"):
        Learner(policy, lane, LearnerConfig(loss=exact))


def test_decisions_without_a_velocity_are_refused() -> None:
    policy = tiny_policy()
    batch, tokens, _ = act(policy)
    older = type(batch)(**{**vars(batch), "velocity": None})
    with pytest.raises(ValueError, match="record the decisions anew"):
        policy.predict(older, tokens, torch.ones(NUM), "next_state")
