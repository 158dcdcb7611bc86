"""Heads over every family of bases keep the rules of policies; one that is off is its base, bit for bit."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from small_flow import TINY
from small_policies import token_policy
from steered_bases import BASES, KINDS, MLP, make_steered
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from vla_rl.engines import PolicyModel
from vla_rl.errors import ConfigError
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.bases import MlpBase, freeze_base
from vla_rl.models.steered.heads import SteeringDistribution
from vla_rl.testing import PolicyContract
from vla_rl.types import Observation, Sampling, with_drawn, with_plan


class OfHeads(PolicyContract):
    family: ClassVar[str]
    kind: ClassVar[str] = "residual"
    settings: ClassVar[dict[str, Any]] = {}
    # a density changes 1 / std^2, a hundred times, as much as the mean it is around
    tolerance = 1e-4

    def make_policy(self) -> PolicyModel[Any]:
        return make_steered(self.family, self.kind, **self.settings)

    def make_observations(self) -> list[Observation]:
        return [BASES[self.family].observe(seed) for seed in range(4)]


class OfSteering(OfHeads):
    def test_actions_of_tokens_are_encoded_to_the_same_actions(
        self, policy: PolicyModel[Any]
    ) -> None:
        """A chunk does not tell which noise or quantile leads to it, so it is not encoded."""
        sampled = self.sample(policy)[2]
        assert sampled.chunk is not None
        actions = policy.decode(sampled.chunk.numpy())
        assert actions.dtype == np.float32
        with pytest.raises(ValueError, match="cannot imitate chunks, expected the kind residual"):
            policy.encode(actions)


class TestOverMlp(OfHeads):
    family = "mlp"


class TestOverOftTokens(OfHeads):
    family = "oft_tokens"
    settings: ClassVar = {"scale": (0.5,) * 6 + (2.0,), "features": "rows", "proprio_size": 8}


class TestOverL1(OfHeads):
    family = "oft_l1"
    settings: ClassVar = {"learns_std": True}


class TestOverFlow(OfHeads):
    family = "flow"
    greedy_has_noise = True  # the reference starts from the seed's noise


class TestNoise(OfSteering):
    family = "flow"
    kind = "noise"
    settings: ClassVar = {"repeats_noise": False, "limit": 2.0, "learns_std": True, "std": 1.0}


class TestTokens(OfSteering):
    family = "oft_tokens"
    kind = "tokens"


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_a_stored_decision_is_scored_without_images_and_without_the_base(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = make_steered(family, kind)
    seen = [BASES[family].observe(seed) for seed in range(3)]
    samplings = [Sampling(seed=seed) for seed in range(3)]
    with torch.inference_mode():
        sampled = policy.sample(policy.prepare(seen), samplings)
    monkeypatch.setattr(policy.base, "read", None)
    stored = [
        with_drawn({}, {name: rows[row].numpy() for name, rows in sampled.drawn.items()})
        for row in range(3)
    ]
    for each in stored:
        policy.check_drawn(each["drawn"])
    found, _ = policy.log_probs(policy.prepare(stored), sampled.tokens, torch.ones(3))
    torch.testing.assert_close(found, sampled.log_probs, atol=1e-5, rtol=0.0)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert policy.network.mean.weight.grad is not None


def test_the_density_is_the_gaussians_around_the_corrected_reference() -> None:
    policy = make_steered("mlp", std=0.2)
    with torch.inference_mode():
        batch = policy.prepare([BASES["mlp"].observe(0)])
        sampled = policy.sample(batch, [Sampling(seed=5, temperature=1.5)])
        greedy = policy.sample(batch, [Sampling(greedy=True)])
        seen = [sampled.drawn[name] for name in ("features", "proprio", "reference")]
        mean, log_std = policy.network(*seen)
    assert torch.equal(greedy.tokens, mean)
    assert log_std.exp().allclose(torch.tensor(0.2))
    normal = torch.distributions.Normal(mean, 0.3)
    torch.testing.assert_close(sampled.log_probs, normal.log_prob(sampled.tokens))
    change = (mean - sampled.drawn["reference"]).abs()
    assert 0.0 < change.max() <= 0.5


def test_a_scale_of_its_own_bounds_each_dimension_of_every_control_step() -> None:
    policy = make_steered("oft_tokens", scale=(0.1,) * 6 + (2.0,))
    with torch.no_grad():
        policy.network.mean.bias.fill_(50.0)
    states = policy.describe_states([BASES["oft_tokens"].observe(3)])
    mean, _ = policy.network(*(torch.from_numpy(each) for each in states.values()))
    change = (mean - torch.from_numpy(states["reference"])).view(8, 7)
    torch.testing.assert_close(change, torch.tensor([0.1] * 6 + [2.0]).expand(8, 7))


def test_described_states_are_what_a_greedy_decision_of_the_base_gives() -> None:
    for family in BASES:
        policy = make_steered(family)
        seen = [BASES[family].observe(seed) for seed in (0, 1)]
        states = policy.describe_states(seen)
        layout = policy.layout
        assert states["features"].shape == (2, layout.features)
        assert states["proprio"].shape == (2, layout.proprio)
        assert states["reference"].shape == (2, layout.action)
        assert layout.action == layout.horizon * layout.action_dim
        base = policy.base.policy
        with torch.inference_mode():
            chosen = base.sample(base.prepare(seen), [Sampling(greedy=True)] * 2)
        own = chosen.tokens if chosen.chunk is None else chosen.chunk
        np.testing.assert_allclose(
            policy.decode(states["reference"]), base.decode(own.numpy()), atol=1e-6
        )


def test_a_deviation_that_is_shared_moves_all_control_steps_alike() -> None:
    policy = make_steered("oft_l1", shares_noise=True)
    with torch.inference_mode():
        batch = policy.prepare([BASES["oft_l1"].observe(0)])
        moved = policy.sample(batch, [Sampling(seed=3)]).tokens
        greedy = policy.sample(batch, [Sampling(greedy=True)]).tokens
    steps = (moved - greedy).view(8, 7)
    torch.testing.assert_close(steps, steps[:1].expand(8, 7))
    assert steps.abs().max() > 0.05


def test_the_base_is_frozen_and_shared_by_copies() -> None:
    policy = make_steered("oft_tokens")
    copied = policy.copy()
    assert copied.base is policy.base
    of_base = {id(each) for each in policy.base.policy.network.parameters()}
    assert not of_base & {id(each) for each in policy.network.parameters()}
    assert not any(each.requires_grad for each in policy.base.policy.network.parameters())
    assert all(name.startswith("steering_head.") for name in policy.checkpoint_tensors())
    trained = sum(each.numel() for each in policy.network.parameters() if each.requires_grad)
    assert trained < 20_000


def test_the_base_follows_the_head_to_its_device() -> None:
    policy = make_steered("mlp")
    copied = policy.copy()
    policy.network.to("meta")  # the only other device that every machine has
    assert policy.base.device.type == "meta"
    assert copied.network.norm.weight.device.type == "cpu"


def test_a_plan_that_is_to_be_continued_is_refused() -> None:
    policy = make_steered("flow")
    seen = with_plan(BASES["flow"].observe(0), np.zeros((2, 3), np.float32), 1)
    batch = policy.prepare([seen])
    with pytest.raises(ValueError, match="which a head over a flow policy does not do"):
        policy.sample(batch, [Sampling()])


@pytest.mark.parametrize(
    ("settings", "family", "problem"),
    [
        ({"kind": "noise"}, "oft_l1", "starts from no noise; take a flow policy"),
        ({"kind": "tokens"}, "flow", "no distributions of tokens"),
        ({"scale": (0.5, 0.5, 0.5)}, "mlp", "scale has 3 numbers, expected 1, or 2"),
        ({"features": "rows"}, "flow", "features is 'rows', but a FlowPolicy has one vector"),
        ({"reference_by_mean": True}, "oft_l1", "reference_by_mean is set"),
    ],
)
def test_a_base_that_does_not_suit_the_settings_is_refused(
    settings: dict[str, Any], family: str, problem: str
) -> None:
    config = SteeringConfig(**settings)
    base = BASES[family].make(0)
    with pytest.raises(ConfigError, match=problem):
        SteeredPolicy.create(base, config, seed=0)


def test_a_policy_that_cannot_be_a_base_is_named() -> None:
    base, config = token_policy(), SteeringConfig()
    with pytest.raises(ConfigError, match="a OpenVla cannot be the frozen base"):
        SteeredPolicy.create(base, config, seed=0)
    head = make_steered("mlp")
    with pytest.raises(ConfigError, match="a SteeredPolicy cannot be the frozen base"):
        SteeredPolicy.create(head, config, seed=0)


def test_a_family_of_ones_own_is_the_base_that_its_class_names(import_folder: Path) -> None:
    (import_folder / "own_base.py").write_text(
        "from vla_rl.models.mlp import MlpPolicy\n"
        "from vla_rl.models.steered.bases import MlpBase\n"
        "class OwnBase(MlpBase):\n"
        "    pass\n"
        "class Own(MlpPolicy):\n"
        "    frozen_base = 'own_base:OwnBase'\n"
    )
    own = resolve_name("own_base:Own").create(MLP, seed=0)
    assert type(freeze_base(own)).__name__ == "OwnBase"
    assert type(freeze_base(MlpPolicy.create(MLP, seed=0))) is MlpBase


def test_a_setting_that_the_kind_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"limit is 2\.0, expected its default"):
        SteeringConfig(limit=2.0)


def test_stored_decisions_of_another_base_are_named() -> None:
    policy = make_steered("mlp")
    with pytest.raises(ValueError, match="nothing as 'features', expected \\[64\\]"):
        policy.check_drawn(None)
    drawn = {"features": np.zeros(8, np.float32)}
    with pytest.raises(ValueError, match="shape \\[8\\] as 'features', expected \\[64\\]"):
        policy.check_drawn(drawn)


def test_numbers_that_repeat_others_are_not_free() -> None:
    assert make_steered("flow", "noise").network.num_free == 3
    assert make_steered("flow", "noise", repeats_noise=False).network.num_free == 12
    assert make_steered("flow").network.num_free == 12


MEAN = torch.tensor([[0.3, -0.8], [1.2, 0.0]])

LOG_STD = torch.tensor([[-1.0, 0.2], [-0.5, -2.0]])

NOISE = torch.tensor([[0.5, -1.5], [2.0, 0.1]])


def test_without_a_limit_it_is_a_gaussian() -> None:
    found = SteeringDistribution(MEAN, LOG_STD)
    action = found.sample(NOISE)
    expected = Normal(MEAN, LOG_STD.exp())
    torch.testing.assert_close(action, MEAN + LOG_STD.exp() * NOISE)
    torch.testing.assert_close(found.log_prob(action), expected.log_prob(action))
    torch.testing.assert_close(found.entropy, expected.entropy())
    assert torch.equal(found.mode, MEAN)


def test_with_a_limit_it_is_a_squashed_gaussian() -> None:
    found = SteeringDistribution(MEAN, LOG_STD, limit=2.5)
    squashed = [TanhTransform(), AffineTransform(0.0, 2.5)]
    expected = TransformedDistribution(Normal(MEAN, LOG_STD.exp()), squashed)  # type: ignore[no-untyped-call]
    action, log_prob = found.sample_with_log_prob(NOISE)
    assert action.abs().max() < 2.5
    wanted = expected.log_prob(action)
    torch.testing.assert_close(log_prob, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.log_prob(action), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.mode, 2.5 * MEAN.tanh())


def test_an_action_at_its_limit_has_a_finite_density() -> None:
    found = SteeringDistribution(MEAN, LOG_STD, limit=1.0)
    assert found.log_prob(torch.ones(2, 2)).isfinite().all()
    _, log_prob = found.sample_with_log_prob(torch.full((2, 2), 40.0))
    assert log_prob.isfinite().all()


def test_a_temperature_multiplies_the_deviation_of_its_row() -> None:
    found = SteeringDistribution(MEAN, LOG_STD).tempered(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(found.log_std.exp()[0], LOG_STD.exp()[0])
    torch.testing.assert_close(found.log_std.exp()[1], 2.0 * LOG_STD.exp()[1])


@pytest.mark.parametrize("limit", [None, 1.0])
def test_shared_noise_has_the_density_of_one_control_step(limit: float | None) -> None:
    mean, log_std = MEAN.repeat(1, 3), LOG_STD.repeat(1, 3)
    shared = SteeringDistribution(mean, log_std, limit, num_shared=2)
    noise = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    action, log_prob = shared.sample_with_log_prob(noise)
    assert torch.equal(action, action[:, :2].repeat(1, 3))
    alone = SteeringDistribution(MEAN, LOG_STD, limit)
    torch.testing.assert_close(log_prob[:, :2], alone.sample_with_log_prob(noise[:, :2])[1])
    assert (log_prob[:, 2:] == 0.0).all()
    assert (shared.entropy[:, 2:] == 0.0).all()


def test_the_gradient_of_a_sampled_density_is_that_of_finite_differences() -> None:
    mean = MEAN.double().requires_grad_()
    log_std = LOG_STD.double().requires_grad_()

    def density(mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
        drawn = SteeringDistribution(mean, log_std, limit=1.5)
        action, log_prob = drawn.sample_with_log_prob(NOISE.double())
        return log_prob + action

    assert torch.autograd.gradcheck(density, (mean, log_std))


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
