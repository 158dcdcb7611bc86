"""Recomputed activations: the same gradients from a fraction of what is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shallow_networks import shallow
from torch import Tensor

from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaConfig
from vla_rl.types import Sampling

MakeObservation = Callable[..., dict[str, Any]]
Policy = OpenVla | OpenVlaOft


@pytest.fixture(params=["openvla", "openvla_oft", "adapters"])
def policy(request: pytest.FixtureRequest, config: OpenVlaOftConfig) -> Policy:
    config = shallow(config)
    if request.param == "openvla":
        shared = {
            name: getattr(config, name)
            for name in OpenVlaConfig.__struct_fields__
            if hasattr(config, name)
        }
        return OpenVla.create(OpenVlaConfig(**{**shared, "cameras": ("image",)}), seed=0)
    oft = OpenVlaOft.create(config, seed=0)
    return oft.adapted(LoraConfig(rank=4), seed=1) if request.param == "adapters" else oft


def gradients(policy: Policy, observation: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The gradients of some log-probs by name, and the bytes that were kept for them."""
    batch = policy.prepare([observation] * 4)
    with torch.no_grad():
        tokens, _ = policy.sample(batch, [Sampling(seed=seed) for seed in range(4)])
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    policy.network.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs, _ = policy.log_probs(batch, tokens, torch.ones(4))
    torch.autograd.backward(log_probs.sum())
    found = {
        name: p.grad.clone() for name, p in policy.network.named_parameters() if p.grad is not None
    }
    return found, sum(kept.values())


def test_gradients_are_the_same_and_less_is_kept(
    policy: Policy, make_observation: MakeObservation
) -> None:
    observation = make_observation(0)
    expected, all_bytes = gradients(policy, observation)
    policy.recompute_activations()
    found, bytes_kept = gradients(policy, observation)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    parameters = sum(
        parameter.untyped_storage().nbytes() for parameter in policy.network.parameters()
    )
    assert bytes_kept < 0.5 * all_bytes, (bytes_kept, all_bytes, parameters)


def test_names_stay_and_a_copy_recomputes_with_weights_of_its_own(
    policy: Policy, make_observation: MakeObservation
) -> None:
    names = list(policy.checkpoint_tensors())
    expected, _ = gradients(policy, make_observation(0))
    policy.recompute_activations()
    assert list(policy.checkpoint_tensors()) == names
    copied = policy.copy()
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
    found, _ = gradients(copied, make_observation(0))
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
