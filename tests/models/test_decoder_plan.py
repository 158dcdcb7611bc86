"""The layers of a decoder that ranks share are named as transformers names them, with adapters."""

from types import SimpleNamespace

from torch import nn

from vla_rl.models.blocks import decoder_plan

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
