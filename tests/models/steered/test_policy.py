"""Heads over every family of bases keep the rules of policies, and score without their base."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from small_policies import token_policy
from steered_bases import BASES, KINDS, MLP, make_steered

from vla_rl.engines import PolicyModel
from vla_rl.errors import ConfigError
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.bases import MlpBase, freeze_base
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
