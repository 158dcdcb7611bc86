"""The tensor plan of a trunk of decoder layers with transformers' names: Llama, Qwen2, Qwen3."""

from typing import Any, Final

from torch import nn

from vla_rl.learner.plan import TensorPlan

BY_OUTPUTS: Final = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
BY_INPUTS: Final = ("self_attn.o_proj", "mlp.down_proj")
OF_HEADS: Final = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of queries and keys, which Qwen3 has."""


def decoder_plan(network: nn.Module, layers: str, config: Any) -> TensorPlan:
    """Return the plan of the decoder layers of a network.

    Args:
        network: the whole network.
        layers: name of its list of layers.
        config: transformers' configuration of the trunk.

    An adapter is cut as its layer is: beside outputs its second half, beside inputs its first.
    """
    names = [f"{layers}.{number}" for number in range(config.num_hidden_layers)]
    return TensorPlan(
        by_outputs=_linears(network, names, BY_OUTPUTS, "lora_B"),
        by_inputs=_linears(network, names, BY_INPUTS, "lora_A"),
        of_heads=tuple(
            f"{name}.{norm}"
            for name in names
            for norm in OF_HEADS
            if hasattr(network.get_submodule(name).self_attn, norm.rpartition(".")[2])
        ),
        counts={
            "attention heads": config.num_attention_heads,
            "heads of keys and values": config.num_key_value_heads,
            "numbers in a feed-forward part": config.intermediate_size,
        },
    )


def _linears(
    network: nn.Module, layers: list[str], parts: tuple[str, ...], half: str
) -> tuple[str, ...]:
    found: list[str] = []
    for name in (f"{layer}.{part}" for layer in layers for part in parts):
        linear: Any = network.get_submodule(name)
        if not hasattr(linear, "base_layer"):
            found.append(name)
            continue
        found.append(f"{name}.base_layer")
        found += [f"{name}.{half}.{adapter}" for adapter in getattr(linear, half)]
    return tuple(found)
