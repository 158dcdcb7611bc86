"""Decoder layers of pi0 and pi0.5: Gemma's, in which a chunk's tokens attend to the prefix's keys.

    PaliGemma's layers   x + attention(norm x), x + mlp(norm x)          weights of the norms are learnt
    pi0's expert         the same, at a smaller width
    pi0.5's expert       x + gate * attention(norm x), likewise the MLP  scale, shift and gate of the
                                                                         norms follow from the time

Both models have one key and value head size for trunk and expert, so the expert's queries are matched
with the trunk's keys, layer by layer (Black et al. 2024, arXiv:2410.24164, appendix B; Physical
Intelligence 2025, arXiv:2504.16054).
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.gemma.configuration_gemma import GemmaConfig
from transformers.models.gemma.modeling_gemma import (
    GemmaAttention,
    GemmaDecoderLayer,
    GemmaMLP,
    GemmaRMSNorm,
    apply_rotary_pos_emb,
)

from vla_rl.models.attention import GIVEN_MASK, attend
from vla_rl.types import Config, PositiveInt

ROTARY_BASE: Final = 10_000.0
"""Base of the rotary wavelengths, Gemma's."""

NORM_EPSILON: Final = 1e-6

MASKED: Final = -2.3819763e38
"""Number added to masked scores, openpi's. It is finite: a row that sees nothing becomes the mean of
all values and not NaN, and nothing reads such a row."""


class GemmaSize(Config, frozen=True, kw_only=True):
    """Sizes of a Gemma trunk.

    Example:
        GemmaSize(width=2048, depth=18, mlp_width=16_384)  # gemma_2b
        GemmaSize(width=1024, depth=18, mlp_width=4096)  # gemma_300m
    """

    width: PositiveInt
    """Width of hidden states."""

    depth: PositiveInt
    """Number of layers."""

    mlp_width: PositiveInt
    """Width inside of the MLPs."""

    num_heads: PositiveInt = 8
    """Heads of queries."""

    num_key_heads: PositiveInt = 1
    """Heads of keys and values."""

    head_size: PositiveInt = 256
    """Width of a head."""

    def make_config(self, vocabulary: int = 1) -> GemmaConfig:
        """Return transformers' configuration of such a trunk."""
        config = GemmaConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            intermediate_size=self.mlp_width,
            num_hidden_layers=self.depth,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_key_heads,
            head_dim=self.head_size,
            hidden_activation="gelu_pytorch_tanh",
            rms_norm_eps=NORM_EPSILON,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        config._attn_implementation = GIVEN_MASK
        return config


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale and shift follow from a condition; it also returns a gate for the residual."""

    def __init__(self, width: int, condition_width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(condition_width, 3 * width)
        # At first a plain norm with closed gates, as diffusion transformers begin (adaLN-zero).
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states and the gate.

        Args:
            hidden: [B, L, D].
            condition: [B, condition_width].

        Returns: [B, L, D] and [B, 1, D], in the dtype of `hidden`.
        """
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype))[:, None].chunk(3, -1)
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + NORM_EPSILON)
        output = normed * (1.0 + scale.float()) + shift.float()
        return output.type_as(hidden), gate.type_as(hidden)


class LayerContext(NamedTuple):
    """Arguments that all layers of one pass share.

    Attributes:
        cos, sin: rotary tables, [B, L, head size].
        mask: float [B, 1, L, keys], 0 or `MASKED`, or bool; keys of the prefix come first.
        condition: [B, D] for adaptive norms.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor
    condition: Tensor | None = None


class PiLayer(GemmaDecoderLayer):  # type: ignore[misc]
    """A Gemma layer that takes keys and values of a prefix, and returns those of its own tokens."""

    def __init__(self, config: GemmaConfig, index: int, *, is_adaptive: bool) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = GemmaAttention(config, index)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = make_norm(config, is_adaptive)
        self.post_attention_layernorm = make_norm(config, is_adaptive)

    def forward(
        self,
        hidden_states: Tensor,
        context: LayerContext,
        prefix: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the layer.

        Args:
            hidden_states: [B, L, D].
            context: rotary tables, mask and condition.
            prefix: keys and values [B, heads, prefix, head size] of tokens before these.

        Returns: hidden states [B, L, D]; keys and values of these tokens [B, heads, L, head size].
        """
        normed, gate = apply_norm(self.input_layernorm, hidden_states, context.condition)
        attended, keys, values = self._attend(normed, context, prefix)
        hidden_states = add_residual(hidden_states, attended, gate)
        normed, gate = apply_norm(self.post_attention_layernorm, hidden_states, context.condition)
        return add_residual(hidden_states, self.mlp(normed), gate), keys, values

    def _attend(
        self, hidden: Tensor, context: LayerContext, prefix: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.self_attn
        queries, keys, values = (
            project(hidden).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, context.cos, context.sin)
        own = (keys, values)
        if prefix is not None:
            keys, values = (
                torch.cat([before.to(new.dtype), new], dim=2)
                for before, new in zip(prefix, own, strict=True)
            )
        mask = context.mask
        if mask.is_floating_point():
            mask = mask.to(queries.dtype)
        found, _ = attend(
            attention, queries, keys, values, mask, scaling=attention.scaling, is_causal=False
        )
        return attention.o_proj(found.flatten(2)), *own


def make_norm(config: GemmaConfig, is_adaptive: bool) -> nn.Module:
    """Return a norm of a trunk's width, adaptive to a condition of the same width or not."""
    width = config.hidden_size
    return AdaptiveNorm(width, width) if is_adaptive else GemmaRMSNorm(width, NORM_EPSILON)


def apply_norm(
    norm: nn.Module, hidden: Tensor, condition: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return normed hidden states, and the gate of an adaptive norm."""
    if isinstance(norm, AdaptiveNorm):
        assert condition is not None
        normed, gate = norm(hidden, condition)
        return normed, gate
    plain: Tensor = norm(hidden)
    return plain, None


def add_residual(hidden: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    """Return hidden + update, or hidden + gate * update."""
    return hidden + update if gate is None else hidden + gate * update


def rotary_tables(positions: Tensor, head_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, L, head size] at positions int64 [B, L], computed in float32."""
    exponents = torch.arange(0, head_size, 2, device=positions.device).float() / head_size
    # computed anew in each pass, because a cast of the network would round a stored table
    angles = positions[..., None].float() * (1.0 / ROTARY_BASE**exponents)
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def additive_mask(visible: Tensor) -> Tensor:
    """Return float32 [B, 1, Q, K] with 0 where bool [B, Q, K] is True, and `MASKED` elsewhere."""
    return torch.where(visible[:, None], 0.0, MASKED)


def linear_dtype(layers: Any) -> torch.dtype:
    """Return the dtype of the linear layers of a stack, whose norms may have another one."""
    dtype: torch.dtype = layers[0].self_attn.q_proj.weight.dtype
    return dtype


def run_layers(
    layers: Any,
    hidden: Tensor,
    context: LayerContext,
    prefix: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a stack of `PiLayer`.

    Args:
        layers: the stack.
        hidden: [B, L, D].
        context: shared by all layers.
        prefix: keys and values of the prefix, one for each layer.

    Returns: hidden states before the last norm, keys and values of each layer.
    """
    keys, values = [], []
    for index, layer in enumerate(layers):
        before = None if prefix is None else (prefix[0][index], prefix[1][index])
        hidden, own_keys, own_values = layer(hidden, context, before)
        keys.append(own_keys)
        values.append(own_values)
    return hidden, tuple(keys), tuple(values)
