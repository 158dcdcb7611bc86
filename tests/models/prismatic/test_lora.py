"""Adapters: nothing changes at first, only they are trained, and merged they act as they did beside the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]


@pytest.fixture
def adapted() -> OpenVlaOft:
    return OpenVlaOft.create(tiny(image_size=28), seed=0).adapted(LoraConfig(rank=4, alpha=8), seed=1)


def shake(policy: OpenVlaOft) -> None:
    """Give every adapter something to say."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.network.named_parameters():
        if ".lora_B." in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_new_adapters_change_nothing(adapted: OpenVlaOft, make_observation: MakeObservation) -> None:
    plain = OpenVlaOft.create(tiny(image_size=28), seed=0)
    batch = plain.prepare([make_observation(0)])
    with torch.no_grad():
        torch.testing.assert_close(adapted.network(batch), plain.network(batch), atol=1e-6, rtol=0)


def test_only_adapters_and_what_stands_beside_the_trunk_are_trained(adapted: OpenVlaOft) -> None:
    trained = {name for name, parameter in adapted.network.named_parameters() if parameter.requires_grad}
    assert all(".lora_" in name or name.startswith("proprio_projector.") for name in trained)
    assert any("language_model.model.layers.0.self_attn.q_proj.lora_A" in name for name in trained)
    assert any("vision_backbone.featurizer.blocks.0.attn.qkv.lora_B" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


def test_merged_adapters_act_as_they_did_beside_the_weights(
    adapted: OpenVlaOft, make_observation: MakeObservation
) -> None:
    plain = OpenVlaOft.create(tiny(image_size=28), seed=0)
    shake(adapted)
    merged = adapted.merged()
    batch = adapted.prepare([make_observation(0)])
    with torch.no_grad():
        torch.testing.assert_close(merged.network(batch), adapted.network(batch), atol=2e-5, rtol=0)
        assert (merged.network(batch) - plain.network(batch)).abs().max() > 1e-3
    assert merged.checkpoint_tensors().keys() == plain.checkpoint_tensors().keys()


def test_an_adapted_policy_comes_back_with_its_adapters(
    adapted: OpenVlaOft, make_observation: MakeObservation, tmp_path: Path
) -> None:
    shake(adapted)
    adapted.save(tmp_path / "adapted")
    again = OpenVlaOft.load(tmp_path / "adapted")
    assert again.config.lora == LoraConfig(rank=4, alpha=8)
    batch = adapted.prepare([make_observation(0)])
    with torch.no_grad():
        assert torch.equal(again.network(batch), adapted.network(batch))


def test_adapters_of_another_shape_go_on_where_the_first_ones_were(
    adapted: OpenVlaOft, make_observation: MakeObservation
) -> None:
    shake(adapted)
    again = adapted.adapted(LoraConfig(rank=2, alpha=4), seed=2)
    assert again.config.lora == LoraConfig(rank=2, alpha=4)
    batch = adapted.prepare([make_observation(0)])
    with torch.no_grad():
        torch.testing.assert_close(again.network(batch), adapted.network(batch), atol=1e-4, rtol=1e-4)


def test_a_continuous_head_is_trained_whole(make_observation: MakeObservation) -> None:
    policy = ContinuousOpenVlaOft.create(tiny(image_size=28, head="l1"), seed=0)
    adapted = policy.adapted(LoraConfig(rank=4, alpha=8), seed=0)
    trained = {name for name, parameter in adapted.network.named_parameters() if parameter.requires_grad}
    assert {f"action_head.{name}" for name, _ in policy.network.action_head.named_parameters()} <= trained
    batch = policy.prepare([make_observation(0)])
    with torch.no_grad():
        greedy = [model.sample(batch, [Sampling(greedy=True)])[0] for model in (policy, adapted.merged())]
    torch.testing.assert_close(greedy[0], greedy[1], atol=1e-5, rtol=0)
