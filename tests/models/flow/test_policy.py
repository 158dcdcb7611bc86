"""A flow policy keeps the rules of a family: what was acted is what is scored, what is predicted."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_flow import TINY, observe, run_episodes, tiny_policy
from torch import Tensor

from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane, EngineConfig, PolicyModel, SampledTokens, TorchActionEngine
from vla_rl.errors import ConfigError
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import (
    SmallFlowFile,
    SmallFlowLayout,
    SmallFlowProcessor,
    create_small_flow,
)
from vla_rl.models.flow.transitions import kl_divergence
from vla_rl.testing import PolicyContract
from vla_rl.types import ActionChunk, Observation, Sampling, with_drawn

NUM = 9

LAYOUT = SmallFlowLayout(SmallFlowFile(policy=TINY, sampling=FlowSampling()))

OBSERVATIONS = [observe(seed) for seed in range(NUM)]


class TestSmallFlow(PolicyContract):
    greedy_has_noise = True

    def make_policy(self) -> PolicyModel[Any]:
        return tiny_policy()

    def make_observations(self) -> list[Observation]:
        return OBSERVATIONS


def act(policy: FlowPolicy, seen: Sequence[Observation], **sampling: Any) -> SampledTokens:
    samplings = [Sampling(seed=number, **sampling) for number in range(len(seen))]
    with torch.inference_mode():
        return policy.sample(policy.prepare(seen), samplings)


def stored(seen: Sequence[Observation], sampled: SampledTokens) -> list[Observation]:
    """Return what a learner prepares: observations with what was drawn for each."""
    return [
        with_drawn(each, {name: rows[row].numpy() for name, rows in sampled.drawn.items()})
        for row, each in enumerate(seen)
    ]


def score(policy: FlowPolicy, seen: Sequence[Observation], tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return policy.log_probs(policy.prepare(seen), tokens, torch.ones(len(tokens)))[0]


def test_in_the_same_batch_the_first_ratio_is_exactly_one() -> None:
    policy = tiny_policy()
    sampled = act(policy, OBSERVATIONS)
    found = score(policy, stored(OBSERVATIONS, sampled), sampled.tokens)
    assert torch.equal(found, sampled.log_probs)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_in_other_batches_with_other_padding_and_cameras_the_first_ratio_is_one(size: int) -> None:
    policy = tiny_policy()
    sampled = act(policy, OBSERVATIONS)
    rows = stored(OBSERVATIONS, sampled)
    limit = 2e-6 * math.sqrt(sampled.tokens.shape[1] / 8)
    order = list(reversed(range(NUM)))
    for first in range(0, NUM, size):
        part = order[first : first + size]
        found = score(policy, [rows[row] for row in part], sampled.tokens[part])
        log_ratio = (found - sampled.log_probs[part]).sum(1)
        assert log_ratio.abs().max() <= limit


def test_equal_observations_are_read_once_and_decide_as_alone() -> None:
    policy = tiny_policy()
    group = [OBSERVATIONS[0]] * 4 + [OBSERVATIONS[1]] * 3
    assert policy.prepare(group).images.shape[0] == 2
    sampled = act(policy, group)
    for row, each in enumerate(group):
        with torch.inference_mode():
            alone = policy.sample(policy.prepare([each]), [Sampling(seed=row)])
        assert torch.equal(alone.drawn["step"][0], sampled.drawn["step"][row])
        torch.testing.assert_close(alone.tokens[0], sampled.tokens[row], atol=1e-5, rtol=0.0)
    assert torch.equal(score(policy, stored(group, sampled), sampled.tokens), sampled.log_probs)
    assert not torch.equal(sampled.tokens[0], sampled.tokens[1])


def test_a_missing_camera_is_not_seen() -> None:
    policy, seen = tiny_policy(), dict(OBSERVATIONS[2])
    assert "wrist_image" not in seen
    inputs = policy.prepare([seen, OBSERVATIONS[0]])
    assert inputs.image_mask.tolist() == [[True, False], [True, True]]
    network: Any = policy.network
    prefix = network.embed_prefix(inputs)
    inputs.images[0, 1] = 0.7
    other = network.embed_prefix(inputs)
    x, time = torch.ones(2, 4, 5), torch.tensor([0.5, 0.2])
    assert torch.equal(network.velocity(prefix, x, time), network.velocity(other, x, time))
    assert torch.equal(network.features(prefix), network.features(other))


def test_every_input_moves_the_velocity() -> None:
    policy = tiny_policy()
    changes: list[Observation] = [
        {"image": 255 - OBSERVATIONS[0]["image"]},
        {"wrist_image": 255 - OBSERVATIONS[0]["wrist_image"]},
        {"state": OBSERVATIONS[0]["state"] + 1.0},
        {"instruction": "reach blue"},
        {"instruction": "red reach"},
    ]
    before = act(policy, [OBSERVATIONS[0]], greedy=True).tokens
    for change in changes:
        after = act(policy, [{**OBSERVATIONS[0], **change}], greedy=True).tokens
        assert (after - before).abs().max() > 1e-4, change


def test_greedy_decisions_end_where_their_tokens_are_and_cannot_be_scored() -> None:
    policy = tiny_policy()
    sampled = act(policy, OBSERVATIONS, greedy=True)
    assert sampled.chunk is not None
    assert torch.equal(sampled.chunk, sampled.tokens)
    assert torch.equal(sampled.log_probs, torch.zeros_like(sampled.log_probs))
    with pytest.raises(ValueError, match=r"step -1, expected 0 to 3: a greedy decision"):
        policy.check_drawn({name: rows[0].numpy() for name, rows in sampled.drawn.items()})


def test_the_exact_divergence_of_two_policies_is_the_mean_of_their_log_ratios() -> None:
    policy, other = tiny_policy(0), tiny_policy(0)
    with torch.no_grad():
        for parameter in other.network.parameters():
            parameter.mul_(1.3)
    seen = [OBSERVATIONS[0]]
    rows = [stored(seen, act(policy, seen))[0]] * 6000
    batch = policy.prepare(rows)
    with torch.inference_mode():
        mean, std = policy.predict_transition(batch)
        exact = kl_divergence(mean, other.predict_transition(batch).mean, std)[0, :, :3].sum()
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
        reached = (mean + std[:, None, None] * noise)[..., :3].flatten(1)
        ones = torch.ones(len(rows))
        ratio = policy.log_probs(batch, reached, ones)[0] - other.log_probs(batch, reached, ones)[0]
    found = ratio.sum(1)
    assert exact > 0.01
    assert abs(float(found.mean() - exact)) < 4.0 * float(found.std()) / math.sqrt(len(rows))


async def test_an_engine_returns_actions_and_what_scoring_needs() -> None:
    policy = tiny_policy()
    async with (
        asyncio.timeout(30),
        DeviceLane(num_threads=1) as lane,
        TorchActionEngine(policy, lane, EngineConfig(max_batch=4)) as engine,
    ):
        chunks: list[ActionChunk] = await asyncio.gather(
            *(engine.act(each, Sampling(seed=row)) for row, each in enumerate(OBSERVATIONS))
        )
    for row, chunk in enumerate(chunks):
        assert chunk.actions.shape == (4, 3)
        policy.check_drawn(chunk.drawn)
        rows = [with_drawn(OBSERVATIONS[row], chunk.drawn)]
        found = score(policy, rows, torch.from_numpy(chunk.tokens)[None])
        np.testing.assert_allclose(found[0].numpy(), chunk.log_probs, atol=1e-5)


def test_imitation_is_the_squared_error_of_the_velocity_over_the_padded_block() -> None:
    policy, random = tiny_policy(imitation_draws=3), np.random.default_rng(0)
    noise = random.normal(size=(2, 3, 4, 5)).astype(np.float32)
    time = random.uniform(0.1, 0.9, (2, 3)).astype(np.float32)
    rows = [
        {**OBSERVATIONS[row], "drawn": {"noise": noise[row], "time": time[row]}} for row in range(2)
    ]
    actions = random.uniform(-1.0, 1.0, (2, 4, 3)).astype(np.float32)
    numbers = torch.from_numpy(policy.encode(actions))
    errors = -policy.log_probs(policy.prepare(rows), numbers, torch.ones(2))[0].detach()

    network: Any = policy.network
    wanted = []
    for row in range(2):
        prefix = network.embed_prefix(policy.prepare([OBSERVATIONS[row]]))
        clean = np.pad(numbers[row].view(4, 3).numpy(), ((0, 0), (0, 2)))
        for draw in range(3):
            t, epsilon = time[row, draw], noise[row, draw]
            x = torch.from_numpy(t * epsilon + (1 - t) * clean)[None]
            v = network.velocity(prefix, x, torch.tensor([t]))[0].detach().numpy()
            wanted.append(((v - (epsilon - clean)) ** 2).mean())
    assert float(errors.mean()) == pytest.approx(float(np.mean(wanted)), rel=1e-5)


def test_imitation_draws_its_own_noise_from_torchs_state() -> None:
    policy = tiny_policy()
    numbers = torch.zeros(2, 12)
    batch, found = policy.prepare(OBSERVATIONS[:2]), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(policy.log_probs(batch, numbers, torch.ones(2))[0])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_features_see_the_observation_alone() -> None:
    policy = tiny_policy()
    rows = stored(OBSERVATIONS, act(policy, OBSERVATIONS))
    with torch.inference_mode():
        alone = policy.features(policy.prepare(OBSERVATIONS))
        assert torch.equal(policy.features(policy.prepare(rows)), alone)


def test_fewer_rows_may_be_executed_than_a_chunk_has_but_imitation_needs_all() -> None:
    whole = create_small_flow(TINY, seed=0)
    processor, layout = SmallFlowProcessor(TINY), LAYOUT
    policy = FlowPolicy(whole.network, processor, layout, FlowSampling(), num_executed=2)
    sampled = act(policy, OBSERVATIONS)
    assert sampled.tokens.shape == (NUM, 6)
    assert sampled.chunk is not None
    assert policy.decode(sampled.chunk.numpy()).shape == (NUM, 2, 3)
    found = score(policy, stored(OBSERVATIONS, sampled), sampled.tokens)
    assert torch.equal(found, sampled.log_probs)
    with pytest.raises(ValueError, match="imitation got 2 rows, expected whole chunks of 4"):
        policy.log_probs(policy.prepare(OBSERVATIONS), sampled.tokens.clone(), torch.ones(NUM))
    with pytest.raises(ConfigError, match="num_executed is 5, expected 1 to 4"):
        FlowPolicy(whole.network, processor, layout, FlowSampling(), num_executed=5)


class Wide(SmallFlowProcessor):
    @property
    def action_dim(self) -> int:
        return 7


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (None, "no state_before and step"),
        ({"step": np.array(0)}, "no state_before and step"),
        ({"state_before": np.zeros((4, 3)), "step": np.array(0)}, r"\[4, 3\], expected \[4, 5\]"),
        ({"state_before": np.zeros((4, 5)), "step": np.array(4)}, "step 4, expected 0 to 3"),
    ],
)
def test_decisions_without_what_scoring_needs_are_refused(drawn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_policy().check_drawn(drawn)


def test_bad_input_is_refused_with_what_to_do() -> None:
    policy = tiny_policy()
    rows = stored(OBSERVATIONS[:2], act(policy, OBSERVATIONS[:2]))
    with pytest.raises(ValueError, match="1 of 2 observations have 'drawn'"):
        policy.prepare([rows[0], OBSERVATIONS[1]])
    with pytest.raises(ValueError, match=r"actions are \[1, 4, 2\], expected \[B, 4, 3\]"):
        policy.encode(np.zeros((1, 4, 2), np.float32))
    with pytest.raises(ConfigError, match="action has 7 numbers, expected at most 5"):
        FlowPolicy(policy.network, Wide(TINY), LAYOUT, FlowSampling())
    for wrong in ({"num_steps": 0}, {"noise_level": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            FlowSampling(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="padded_dim is 2, expected at least the 3 dimensions"):
        msgspec.structs.replace(TINY, padded_dim=2)


NUM_PREDICTED = 6

ADVANTAGES = [1.0, -1.0, 0.5]


def act_and_score(policy: FlowPolicy) -> tuple[Any, Tensor, Tensor]:
    """Return a batch to be scored, its tokens and their log-probs."""
    seen = [observe(seed) for seed in range(NUM_PREDICTED)]
    with torch.inference_mode():
        sampled = policy.sample(
            policy.prepare(seen), [Sampling(seed=row) for row in range(NUM_PREDICTED)]
        )
    rows = [
        with_drawn(each, {name: found[row].numpy() for name, found in sampled.drawn.items()})
        for row, each in enumerate(seen)
    ]
    return policy.prepare(rows), sampled.tokens.clone(), sampled.log_probs.clone()


@pytest.mark.parametrize("noise_level", [0.5, 0.0])
@pytest.mark.parametrize("predicts", ["next_state", "actions"])
def test_the_weights_that_acted_predict_what_acted(noise_level: float, predicts: Any) -> None:
    policy = tiny_policy(noise_level=noise_level)
    batch, tokens, log_probs = act_and_score(policy)
    found = policy.predict(batch, tokens, torch.ones(NUM_PREDICTED), predicts)
    torch.testing.assert_close(found.prediction, found.behavior_prediction, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(found.log_probs, log_probs, atol=1e-5, rtol=0.0)
    own, entropies = policy.log_probs(batch, tokens, torch.ones(NUM_PREDICTED))
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
    batch, tokens, _ = act_and_score(policy)
    found = policy.predict(batch, tokens, torch.ones(NUM_PREDICTED), predicts)
    assert batch.velocity is not None
    moved = type(batch)(**{**vars(batch), "velocity": batch.velocity + 1.0})
    other = policy.predict(moved, tokens, torch.ones(NUM_PREDICTED), predicts)
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
    batch, tokens, _ = act_and_score(policy)
    older = type(batch)(**{**vars(batch), "velocity": None})
    with pytest.raises(ValueError, match="record the decisions anew"):
        policy.predict(older, tokens, torch.ones(NUM_PREDICTED), "next_state")
