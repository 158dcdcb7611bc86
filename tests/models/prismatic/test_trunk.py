"""The trunk computes only what is read, under a mask only if there is padding to hide.

In bfloat16 it multiplies matrices in bfloat16; norms, probabilities, entropies are computed in
float32. The layers that ranks share are named as transformers names them, with adapters.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from vla_rl.models.blocks import decoder_plan
from vla_rl.models.example_inputs import example_row
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.prismatic.config import LlmConfig, OpenVlaConfig, tiny
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


MakeObservation = Callable[..., dict[str, Any]]
Policy = OpenVla | OpenVlaOft

SHORT, LONG = "push", "pick up the black bowl on the stove and place it on the plate"


@pytest.fixture(scope="module", params=["openvla", "oft"])
def either(request: pytest.FixtureRequest) -> Policy:
    shape = tiny(image_size=28, cameras=("image",), proprio=None)
    if request.param == "oft":
        return OpenVlaOft.create(shape, seed=0)
    shared = {
        name: getattr(shape, name)
        for name in ("featurizer", "fused_featurizer", "image_size", "cameras", "llm")
    }
    config = OpenVlaConfig(
        **shared, tokenizer_file=shape.tokenizer_file, action_bounds=shape.action_bounds
    )
    return OpenVla.create(config, seed=0)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that attention was given, in order."""
    given: list[Tensor] = []
    attend = nn.functional.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is not None:
            given.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", noted)
    return given


def learnt(policy: Policy, batch: Any) -> tuple[Tensor, Tensor]:
    """Return log-probs of rows, and the gradient of all weights."""
    tokens = torch.full((2, policy.config.chunk_size * policy.config.action_dim), 1000)
    policy.network.zero_grad()
    log_probs, _ = policy.log_probs(batch, tokens, torch.ones(2))
    torch.autograd.backward(log_probs.sum())
    grads = [each.grad.flatten() for each in policy.network.parameters() if each.grad is not None]
    return log_probs.detach(), torch.cat(grads)


def test_rows_of_one_length_need_no_mask(
    either: Policy, make_observation: MakeObservation, masks: list[Tensor]
) -> None:
    batch = either.prepare([make_observation(seed, LONG) for seed in range(2)])
    learnt(either, batch)  # with it, the network's first check, which tries a mask too
    masks.clear()
    found = learnt(either, batch)
    # a causal trunk's last layer is computed at few positions, whose places are no corner of a square
    expected_shapes = [] if isinstance(either, OpenVlaOft) else [(2, 1, 7)]
    assert [mask.shape[:3] for mask in masks] == expected_shapes
    # padded to a greater width: as an engine that records CUDA graphs is given them
    padded = learnt(either, batch.widened(16, either.config.llm.pad_token_id))
    for one, other in zip(found, padded, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_mask_of_padding_is_a_line_for_each_row(
    either: Policy, make_observation: MakeObservation, masks: list[Tensor]
) -> None:
    batch = either.prepare([make_observation(0, SHORT), make_observation(1, LONG)])
    found = learnt(either, batch)
    masks.clear()
    torch.testing.assert_close(learnt(either, batch), found, atol=0, rtol=0)
    most_queries = 1 if isinstance(either, OpenVlaOft) else 7
    assert masks
    assert all(mask.shape[2] <= most_queries for mask in masks)
    # and padding is hidden: other ids there change nothing
    other = replace(
        batch,
        prompts=torch.where(
            torch.arange(batch.prompts.shape[1]) < batch.prompt_lengths[:, None], batch.prompts, 7
        ),
    )
    torch.testing.assert_close(learnt(either, other)[0], found[0], atol=1e-6, rtol=0)


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


CONFIG = SimpleNamespace(
    num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, intermediate_size=64
)


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, with the names of peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(1, 2)})


def layer(*, adapted: bool = False, norms: bool = False) -> nn.Module:
    attention = {f"{name}_proj": nn.Linear(2, 2) for name in "qkvo"}
    if norms:
        attention |= {"q_norm": nn.LayerNorm(2), "k_norm": nn.LayerNorm(2)}
    feed_forward: dict[str, nn.Module] = {
        f"{name}_proj": nn.Linear(2, 2) for name in ("gate", "up", "down")
    }
    if adapted:
        feed_forward |= {"up_proj": Adapted(), "down_proj": Adapted()}
    made = nn.Module()
    for name, parts in (("self_attn", attention), ("mlp", feed_forward)):
        part = nn.Module()
        for key, each in parts.items():
            part.add_module(key, each)
        made.add_module(name, part)
    return made


def network(**options: bool) -> nn.Module:
    made = nn.Module()
    made.layers = nn.ModuleList([layer(**options), layer(**options)])
    return made


def test_each_layer_is_cut_by_outputs_and_then_by_inputs() -> None:
    plan = decoder_plan(network(), "layers", CONFIG)
    parts = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    assert plan.by_outputs == tuple(
        f"layers.{number}.{part}_proj" for number in (0, 1) for part in parts
    )
    assert plan.by_inputs == tuple(
        f"layers.{number}.{part}_proj" for number in (0, 1) for part in ("self_attn.o", "mlp.down")
    )
    assert plan.of_heads == ()


def test_an_adapter_is_cut_at_the_side_where_its_layer_is() -> None:
    plan = decoder_plan(network(adapted=True), "layers", CONFIG)
    up = [name for name in plan.by_outputs if name.startswith("layers.0.mlp.up_proj")]
    assert up == ["layers.0.mlp.up_proj.base_layer", "layers.0.mlp.up_proj.lora_B.default"]
    down = [name for name in plan.by_inputs if name.startswith("layers.1.mlp.down_proj")]
    assert down == ["layers.1.mlp.down_proj.base_layer", "layers.1.mlp.down_proj.lora_A.default"]


def test_norms_of_heads_are_named_where_the_trunk_has_them() -> None:
    plan = decoder_plan(network(norms=True), "layers", CONFIG)
    assert plan.of_heads == tuple(
        f"layers.{number}.self_attn.{norm}" for number in (0, 1) for norm in ("q_norm", "k_norm")
    )


def test_what_is_dealt_out_is_counted() -> None:
    assert dict(decoder_plan(network(), "layers", CONFIG).counts) == {
        "attention heads": 8,
        "heads of keys and values": 2,
        "numbers in a feed-forward part": 64,
    }
