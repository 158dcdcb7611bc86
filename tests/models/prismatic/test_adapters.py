"""Adapters: nothing changes at first, only they are trained, and merged they act as they did beside
the weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_inputs import shallow

from vla_rl.errors import ConfigError
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaConfig
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def adapted(policy: OpenVlaOft) -> OpenVlaOft:
    """The shared policy with new adapters."""
    return policy.adapted(LoraConfig(rank=4, alpha=8), seed=1)


@pytest.fixture(scope="module")
def shaken(adapted: OpenVlaOft) -> OpenVlaOft:
    copied = adapted.copy()
    shake(copied)
    return copied


def shake(policy: OpenVlaOft) -> None:
    """Give every adapter something to say."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.network.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_new_adapters_change_nothing(
    policy: OpenVlaOft, adapted: OpenVlaOft, make_observation: MakeObservation
) -> None:
    batch = policy.prepare([make_observation(0)])
    with torch.no_grad():
        torch.testing.assert_close(adapted.network(batch), policy.network(batch), atol=1e-6, rtol=0)


def test_only_adapters_and_what_stands_beside_the_trunk_are_trained(adapted: OpenVlaOft) -> None:
    trained = {
        name for name, parameter in adapted.network.named_parameters() if parameter.requires_grad
    }
    assert all(".lora_" in name or name.startswith("proprio_projector.") for name in trained)
    assert any("language_model.model.layers.0.self_attn.q_proj.lora_A" in name for name in trained)
    assert any("vision_backbone.featurizer.blocks.0.attn.qkv.lora_B" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


AUTHORS_OWN = {
    "language_model.lm_head",
    "vision_backbone.featurizer.patch_embed.proj",
    "vision_backbone.fused_featurizer.patch_embed.proj",
}
"""Layers that peft's "all-linear" adapts in OpenVLA, and our own set does not."""


def adapted_layers(policy: OpenVlaOft | OpenVla) -> set[str]:
    return {
        name.partition(".lora_A.")[0] for name in policy.checkpoint_tensors() if ".lora_A." in name
    }


def test_all_linear_adds_the_output_head_and_the_patches_to_our_own_set(
    policy: OpenVlaOft, adapted: OpenVlaOft
) -> None:
    wide = policy.adapted(LoraConfig(rank=4, alpha=8, targets="all-linear"), seed=1)
    assert adapted_layers(wide) - adapted_layers(adapted) == AUTHORS_OWN
    assert adapted_layers(adapted) < adapted_layers(wide)


@pytest.mark.parametrize("family", [pytest.param(OpenVla, marks=pytest.mark.proof), OpenVlaOft])
def test_an_adapted_output_head_and_its_merged_weights_give_the_same_tokens(
    family: Any, make_observation: MakeObservation, tmp_path: Path
) -> None:
    shape = shallow(tiny(image_size=28, cameras=("image",), proprio=None))
    if family is OpenVla:
        shared = {
            name: getattr(shape, name)
            for name in OpenVlaConfig.__struct_fields__
            if hasattr(shape, name)
        }
        shape = OpenVlaConfig(**shared)
    policy = family.create(shape, seed=0)
    wide = policy.adapted(LoraConfig(rank=4, alpha=8, targets="all-linear"), seed=1)
    batch, tokens = (
        policy.prepare([make_observation(0)]),
        torch.full((1, 7 * shape.chunk_size), 900),
    )

    def scores(of: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = of.log_probs(batch, tokens, torch.ones(1))[0]
        return found

    torch.testing.assert_close(scores(wide), scores(policy), atol=1e-5, rtol=0)
    shake(wide)
    only_head = wide.copy()
    for name, parameter in only_head.network.named_parameters():
        if ".lora_B." in name and not name.startswith("language_model.lm_head"):
            parameter.data.zero_()
    assert (scores(only_head) - scores(policy)).abs().max() > 1e-3
    torch.testing.assert_close(scores(wide.merged()), scores(wide), atol=5e-5, rtol=0)
    wide.save(tmp_path / "wide")
    again = family.load(tmp_path / "wide")
    assert again.config.lora == LoraConfig(rank=4, alpha=8, targets="all-linear")
    assert torch.equal(scores(again), scores(wide))


def test_targets_may_be_layers_by_name_and_nothing_else(policy: OpenVlaOft) -> None:
    named = ("language_model.model.layers.0.self_attn.q_proj", "projector.fc2")
    assert adapted_layers(policy.adapted(LoraConfig(rank=2, targets=named), seed=0)) == set(named)
    with pytest.raises(
        ConfigError, match=r"names projector\.fc9, which is not a linear layer or convolution"
    ):
        policy.adapted(LoraConfig(targets=("projector.fc9",)), seed=0)
    with pytest.raises(
        ConfigError, match="targets is 'all', expected 'hidden', 'all-linear' or a list of str"
    ):
        LoraConfig(targets="all")  # type: ignore[arg-type]


def test_merged_adapters_act_as_they_did_beside_the_weights(
    policy: OpenVlaOft, shaken: OpenVlaOft, make_observation: MakeObservation
) -> None:
    merged = shaken.merged()
    batch = shaken.prepare([make_observation(0)])
    with torch.no_grad():
        torch.testing.assert_close(merged.network(batch), shaken.network(batch), atol=2e-5, rtol=0)
        assert (merged.network(batch) - policy.network(batch)).abs().max() > 1e-3
    assert merged.checkpoint_tensors().keys() == policy.checkpoint_tensors().keys()


def test_an_adapted_policy_comes_back_with_its_adapters_and_goes_on_training_them_alone(
    shaken: OpenVlaOft, make_observation: MakeObservation, tmp_path: Path
) -> None:
    shaken.save(tmp_path / "adapted")
    again = OpenVlaOft.load(tmp_path / "adapted")
    assert again.config.lora == LoraConfig(rank=4, alpha=8)
    batch = shaken.prepare([make_observation(0)])
    with torch.no_grad():
        assert torch.equal(again.network(batch), shaken.network(batch))
    learns = [
        {name for name, parameter in each.network.named_parameters() if parameter.requires_grad}
        for each in (shaken, again)
    ]
    assert learns[0] == learns[1]


def test_adapters_of_another_shape_go_on_where_the_first_ones_were(
    shaken: OpenVlaOft, make_observation: MakeObservation
) -> None:
    again = shaken.adapted(LoraConfig(rank=2, alpha=4), seed=2)
    assert again.config.lora == LoraConfig(rank=2, alpha=4)
    batch = shaken.prepare([make_observation(0)])
    with torch.no_grad():
        torch.testing.assert_close(
            again.network(batch), shaken.network(batch), atol=1e-4, rtol=1e-4
        )


def test_a_continuous_head_is_trained_whole(make_observation: MakeObservation) -> None:
    policy = ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1"), seed=0)
    adapted = policy.adapted(LoraConfig(rank=4, alpha=8), seed=0)
    trained = {
        name for name, parameter in adapted.network.named_parameters() if parameter.requires_grad
    }
    assert {
        f"action_head.{name}" for name, _ in policy.network.action_head.named_parameters()
    } <= trained
    batch = policy.prepare([make_observation(0)])
    with torch.no_grad():
        greedy = [
            model.sample(batch, [Sampling(greedy=True)]).tokens
            for model in (policy, adapted.merged())
        ]
    torch.testing.assert_close(greedy[0], greedy[1], atol=1e-5, rtol=0)
