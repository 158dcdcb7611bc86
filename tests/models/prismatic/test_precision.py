"""A policy in bfloat16 multiplies matrices in bfloat16; norms, probabilities and entropies are computed
in float32."""

import pytest
import torch
from torch import Tensor, nn

from vla_rl.models.example_inputs import example_row
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig


@pytest.fixture(scope="module")
def rounded(config: OpenVlaOftConfig) -> OpenVlaOft:
    policy = OpenVlaOft.create(config, seed=0)
    policy.network.bfloat16()
    return policy


def norms_of(policy: OpenVlaOft) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in policy.network.named_modules()
        if "norm" in type(module).__name__.lower()
    }


def test_norms_are_computed_in_float32_and_rounded_once(rounded: OpenVlaOft) -> None:
    norms = norms_of(rounded)
    kinds = {type(norm).__name__ for norm in norms.values()}
    assert {"LlamaRMSNorm", "LayerNorm"} <= kinds
    for name, norm in norms.items():
        width = norm.weight.shape[0]
        # far from zero, where the variance of bfloat16 numbers would be lost in bfloat16
        rows = (100.0 + torch.linspace(-1.0, 1.0, 4 * width).view(4, width)).bfloat16()
        with torch.no_grad():
            found, exact = norm(rows), norm.float()(rows.float())
            norm.bfloat16()
        assert found.dtype == torch.bfloat16, name
        torch.testing.assert_close(found.float(), exact, atol=1e-6, rtol=2**-8)


def test_log_probs_and_entropies_are_float32(rounded: OpenVlaOft) -> None:
    row = example_row(rounded)
    assert row is not None
    logits: list[Tensor] = []
    hook = rounded.network.register_forward_hook(lambda *given: logits.append(given[2]))
    with torch.no_grad():
        log_probs, entropies = rounded.log_probs(row.batch, row.tokens, torch.full((1,), 1.6))
    hook.remove()
    assert logits[0].dtype == torch.bfloat16
    assert log_probs.dtype == entropies.dtype == torch.float32
    exact = (logits[0].double() / 1.6).log_softmax(-1)
    index = row.tokens[..., None] - (1024 - 256)
    torch.testing.assert_close(
        log_probs.double(), exact.gather(-1, index)[..., 0], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        entropies.double(), -(exact.exp() * exact).sum(-1), atol=1e-5, rtol=0
    )
