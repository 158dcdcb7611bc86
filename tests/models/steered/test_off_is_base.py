"""A head that is off is its base, bit for bit."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_flow import TINY
from steered_bases import BASES, KINDS, make_steered

from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.types import Sampling


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_head_that_is_off_acts_as_its_base(family: str, kind: str, greedy: bool) -> None:
    policy = make_steered(family, kind)
    policy.steer(False)
    base = BASES[family].make(0)
    seen = [BASES[family].observe(seed) for seed in range(5)]
    # equal observations too, which some families read once
    for observations in (seen, [seen[0]] * 6):
        samplings = [
            Sampling(seed=7 + row, greedy=greedy, temperature=1.3)
            for row in range(len(observations))
        ]
        with torch.inference_mode():
            own = policy.sample(policy.prepare(observations), samplings)
            expected = base.sample(base.prepare(observations), samplings)
        wanted = expected.tokens if expected.chunk is None else expected.chunk
        assert own.chunk is not None
        assert own.chunk.dtype == wanted.dtype
        assert torch.equal(own.chunk, wanted)
        np.testing.assert_array_equal(policy.decode(own.chunk.numpy()), base.decode(wanted.numpy()))


@pytest.mark.parametrize("family", list(BASES))
def test_what_a_head_that_is_off_records_is_the_chunk_that_ran(family: str) -> None:
    policy = make_steered(family)
    policy.steer(False)
    seen = [BASES[family].observe(seed) for seed in range(3)]
    with torch.inference_mode():
        batch = policy.prepare(seen)
        sampled = policy.sample(batch, [Sampling(seed=seed) for seed in range(3)])
        greedy = policy.sample(batch, [Sampling(seed=seed, greedy=True) for seed in range(3)])
    assert sampled.chunk is not None
    np.testing.assert_allclose(
        policy.decode(sampled.tokens.numpy()), policy.decode(sampled.chunk.numpy()), atol=1e-6
    )
    assert torch.equal(greedy.tokens, greedy.drawn["reference"])
    assert torch.equal(sampled.drawn["reference"], greedy.drawn["reference"])


@pytest.mark.parametrize("family", ["mlp", "oft_tokens"])
def test_the_quantiles_that_a_token_policy_drew_lead_to_the_same_tokens(family: str) -> None:
    policy = make_steered(family, "tokens")
    policy.steer(False)
    seen = [BASES[family].observe(seed) for seed in range(3)]
    with torch.inference_mode():
        batch = policy.prepare(seen)
        sampled = policy.sample(batch, [Sampling(seed=seed) for seed in range(3)])
        again = policy.base.choose_quantiles(policy.base.read(batch.observed), sampled.tokens)
    assert sampled.chunk is not None
    assert torch.equal(again, sampled.chunk)


def test_the_noise_that_a_flow_drew_leads_to_the_same_chunk() -> None:
    # without padded dimensions, whose noise a head does not choose
    base = create_small_flow(msgspec.structs.replace(TINY, padded_dim=None), seed=0)
    config = SteeringConfig(kind="noise", repeats_noise=False)
    policy = SteeredPolicy.create(base, config, seed=0)
    policy.steer(False)
    samplings = [Sampling(seed=seed, greedy=True) for seed in range(3)]
    with torch.inference_mode():
        batch = policy.prepare([BASES["flow"].observe(seed) for seed in range(3)])
        sampled = policy.sample(batch, samplings)
        noise = sampled.tokens.view(3, TINY.horizon, 3)
        again = policy.base.choose_from_noise(policy.base.read(batch.observed), noise, samplings)
    assert sampled.chunk is not None
    assert torch.equal(again, sampled.chunk)


def test_padded_dimensions_and_later_rows_repeat_the_noise_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_steered("flow", "noise")
    given: list[torch.Tensor] = []
    flow = policy.base.policy
    choose = flow.choose

    def record(read: Any, samplings: Any, noise: torch.Tensor) -> Any:
        given.append(noise)
        return choose(read, samplings, noise)

    monkeypatch.setattr(flow, "choose", record)
    first, second = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    with torch.inference_mode():
        read = policy.base.read(policy.prepare([BASES["flow"].observe(0)]).observed)
        policy.base.choose_from_noise(read, torch.stack([first, second])[None], [Sampling()])
    rows = [torch.cat([row, row[:2]]) for row in (first, second, second, second)]
    assert torch.equal(given[0][0], torch.stack(rows))


def test_a_head_chooses_the_noise_of_one_control_step_and_the_others_repeat_it() -> None:
    policy = make_steered("flow", "noise", limit=1.5, std=0.5)
    assert policy.network.num_free == 3
    with torch.inference_mode():
        batch = policy.prepare([BASES["flow"].observe(seed) for seed in range(2)])
        sampled = policy.sample(batch, [Sampling(seed=seed) for seed in range(2)])
    steps = sampled.tokens.view(2, 4, 3)
    assert torch.equal(steps, steps[:, :1].expand(2, 4, 3))
    assert 0.0 < steps.abs().max() <= 1.5
    assert (sampled.log_probs[:, :3] != 0.0).all()
    assert (sampled.log_probs[:, 3:] == 0.0).all()


def test_a_new_residual_head_corrects_nothing() -> None:
    policy = SteeredPolicy.create(BASES["oft_l1"].make(0), SteeringConfig(), seed=0)
    with torch.inference_mode():
        sampled = policy.sample(
            policy.prepare([BASES["oft_l1"].observe(0)]), [Sampling(greedy=True)]
        )
    assert torch.equal(sampled.tokens, sampled.drawn["reference"])


def test_whether_a_head_acts_travels_with_its_weights() -> None:
    policy = make_steered("mlp")
    copied = policy.copy()
    policy.steer(False)
    assert copied.is_steering
    with torch.no_grad():  # as an engine takes over weights
        for own, new in zip(copied.network.parameters(), policy.network.parameters(), strict=True):
            own.copy_(new)
    assert not copied.is_steering
    assert not copied.copy().is_steering


def test_quantiles_rise_with_the_number_that_steers() -> None:
    for family in ("mlp", "oft_tokens"):
        policy = make_steered(family, "tokens")
        with torch.inference_mode():
            read = policy.base.read(policy.prepare([BASES[family].observe(0)]).observed)
            size = policy.layout.action
            low, high = (
                policy.base.choose_quantiles(read, torch.full((1, size), w)) for w in (-2.0, 2.0)
            )
        actions = [policy.decode(each.numpy()) for each in (low, high)]
        assert (actions[1] >= actions[0]).all()
        assert (actions[1] > actions[0]).any()


def test_a_greedy_reference_can_be_the_mean_of_each_tokens_distribution() -> None:
    base = BASES["mlp"].make(0)
    policy = make_steered("mlp", reference_by_mean=True)
    seen = [BASES["mlp"].observe(seed) for seed in range(6)]
    greedy = Sampling(greedy=True)
    with torch.inference_mode():
        expected = base.sample(
            base.prepare(seen), [msgspec.structs.replace(greedy, by_mean=True)] * 6
        ).tokens
        likeliest = base.sample(base.prepare(seen), [greedy] * 6).tokens
    assert not torch.equal(expected, likeliest)
    found = policy.decode(policy.describe_states(seen)["reference"])
    np.testing.assert_allclose(found, base.decode(expected.numpy()), atol=1e-6)
