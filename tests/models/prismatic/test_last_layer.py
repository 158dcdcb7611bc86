"""Of the last layer only what is read is computed, and it is what the whole layer would
have given.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vla_rl.models.prismatic.config import LlmConfig
from vla_rl.models.prismatic.trunk import bidirectional_mask, build_trunk, gather_rows, token_mask

LENGTHS = torch.tensor([12, 9, 7])
READ = torch.tensor([[8, 9, 10], [5, 6, 7], [0, 6, 3]])
MASKS = ("both ways", "causal, padded", "causal, nothing padded")


def mask_of(kind: str) -> Tensor:
    if kind == "both ways":
        return bidirectional_mask(LENGTHS, 12)
    return (
        token_mask(LENGTHS, 12) if kind == "causal, padded" else torch.ones(3, 12, dtype=torch.bool)
    )


def trunk_of(kind: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlmConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, vocab_size=64
    )
    return build_trunk(config, is_causal=kind != "both ways")


def read(trunk: LlamaForCausalLM, sequence: Tensor, kind: str) -> Tensor:
    output = trunk.model(
        inputs_embeds=sequence, attention_mask=mask_of(kind), use_cache=False, read=READ
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def read_from_all(trunk: LlamaForCausalLM, sequence: Tensor, kind: str) -> Tensor:
    output = trunk.model(inputs_embeds=sequence, attention_mask=mask_of(kind), use_cache=False)
    return gather_rows(output.last_hidden_state, READ)


@pytest.fixture
def sequence() -> Tensor:
    return torch.randn(3, 12, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", MASKS)
def test_what_is_read_is_what_the_whole_layer_gives_there(kind: str, sequence: Tensor) -> None:
    trunk = trunk_of(kind)
    with torch.inference_mode():
        torch.testing.assert_close(
            read(trunk, sequence, kind), read_from_all(trunk, sequence, kind), atol=2e-6, rtol=0
        )


@pytest.mark.parametrize("kind", MASKS)
def test_gradients_are_those_of_the_whole_layer(kind: str, sequence: Tensor) -> None:
    trunk, seen = trunk_of(kind), sequence.requires_grad_()
    parameters = [
        parameter
        for name, parameter in trunk.model.named_parameters()
        if name != "embed_tokens.weight"
    ]
    one, other = (
        torch.autograd.grad(way(trunk, seen, kind).square().sum(), [seen, *parameters])
        for way in (read, read_from_all)
    )
    for mine, whole in zip(one, other, strict=True):
        torch.testing.assert_close(mine, whole, atol=1e-5, rtol=1e-4)


def test_nothing_but_what_is_read_goes_through_the_last_mlp(sequence: Tensor) -> None:
    trunk, sizes = trunk_of("both ways"), []
    for layer in trunk.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, output: sizes.append(output.shape[1]))
    read(trunk, sequence, "both ways")
    assert sizes == [12, 3]


def test_parameters_are_those_of_a_trunk_with_whole_layers() -> None:
    trunk = trunk_of("both ways")
    torch.manual_seed(0)
    plain = LlamaForCausalLM(trunk.config)
    assert type(plain.model.layers[-1]) is LlamaDecoderLayer
    names, others = dict(trunk.named_parameters()), dict(plain.named_parameters())
    assert list(names) == list(others)
    assert all(
        torch.equal(names[name], others[name]) and names[name].requires_grad for name in names
    )
