"""The Llama trunk of transformers, causal or bidirectional, with exact positions.

Two faults ruin a policy without an error: a causal mask in OpenVLA-OFT (tens of points), and rotary
frequencies rounded by a cast to bfloat16 (a phase error of 0.4 rad at position 300). The first is
checked by `require_bidirectional`; the second cannot happen to `ExactRotary`.

Rows of different lengths make one batch: each has the same positions as it would have alone, tokens
first, padding last. The last layer is computed only where its output is read:

    all layers before it       all positions: the next one needs keys and values of each
    the last layer             keys and values of all positions; the rest only of those that are read

An action is read at a few positions after hundreds of patches. The results equal those of the whole
layer, because no position needs another's output of the same layer.
"""

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from vla_rl.errors import ConfigError
from vla_rl.models.attention import is_causal, use_given_masks
from vla_rl.models.blocks import Uncompiled
from vla_rl.models.prismatic.config import LlmConfig


def token_mask(lengths: Tensor, num_positions: int) -> Tensor:
    """Return bool [B, L]: True for the first `lengths` int64 [B] positions of each row."""
    return torch.arange(num_positions, device=lengths.device) < lengths[:, None]


def bidirectional_mask(lengths: Tensor, num_positions: int) -> Tensor:
    """Return the bool [B, 1, 1, L] attention mask: every position sees every token of its row,
    before it or after.
    """
    # one line for all queries: kernels of a GPU add masks as numbers, and a square would be written
    # out for that in each layer
    return token_mask(lengths, num_positions)[:, None, None, :]


def insert_tail(rows: Tensor, lengths: Tensor, tail: Tensor, fill: int) -> Tensor:
    """Insert ids `tail` int64 [B, T] right after the first `lengths` ids of `rows` int64 [B, P]:
    int64 [B, P + T].
    """
    width, num_tail = rows.shape[1], tail.shape[1]
    offsets = torch.arange(width + num_tail, device=rows.device) - lengths[:, None]
    padded = torch.nn.functional.pad(rows, (0, num_tail), value=fill).masked_fill(
        offsets >= 0, fill
    )
    if num_tail == 0:
        return padded
    in_tail = (offsets >= 0) & (offsets < num_tail)
    return torch.where(in_tail, tail.gather(1, offsets.clamp(0, num_tail - 1)), padded)


def consecutive_positions(first: Tensor, num: int) -> Tensor:
    """Return int64 [B, num]: consecutive positions in each row, starting at `first` int64 [B]."""
    return first[:, None] + torch.arange(num, device=first.device)


def gather_rows(rows: Tensor, read: Tensor) -> Tensor:
    """Return [B, T, D]: the entries of `rows` [B, L, D] at the positions `read` int64 [B, T]."""
    return rows.gather(1, read[..., None].expand(-1, -1, rows.shape[2]))


class LastLayer(LlamaDecoderLayer):
    """A decoder layer that takes `read` int64 [B, T], positions by row, and then returns [B, T, D];
    without it, all positions.
    """

    def forward(self, hidden_states: Tensor, *, read: Tensor | None = None, **given: Any) -> Tensor:  # type: ignore[override]
        """Run the layer.

        Args: hidden_states [B, L, D], and the keyword arguments of every decoder layer.
        """
        if read is None:
            whole: Tensor = super().forward(hidden_states, **given)
            return whole
        residual = gather_rows(hidden_states, read)
        inputs = self.input_layernorm(hidden_states)
        residual = residual + self._attend(
            inputs, read, given["attention_mask"], *given["position_embeddings"]
        )
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output

    def _attend(
        self, inputs: Tensor, read: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        attention = self.self_attn
        queries, keys, values = (
            project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project, rows in (
                (attention.q_proj, gather_rows(inputs, read)),
                (attention.k_proj, inputs),
                (attention.v_proj, inputs),
            )
        )
        cos, sin = (table.expand(len(inputs), -1, -1) for table in (cos, sin))
        queries, _ = apply_rotary_pos_emb(
            queries, queries, gather_rows(cos, read), gather_rows(sin, read)
        )
        keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        mask = self._select_mask(read, inputs.shape[1], mask)
        found = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=attention.scaling
        )
        attended: Tensor = attention.o_proj(found.transpose(1, 2).flatten(2))
        return attended

    def _select_mask(self, read: Tensor, num_positions: int, mask: Tensor | None) -> Tensor | None:
        """Return the mask of the positions that are read; None if they see all others."""
        if mask is None:
            if not is_causal(self.self_attn.config):
                return None
            return torch.arange(num_positions, device=read.device) <= read[:, None, :, None]
        if mask.shape[2] == 1:  # the same for every position
            return mask
        return mask.gather(2, read[:, None, :, None].expand(-1, -1, -1, mask.shape[3]))


def make_last_layer_selective(trunk: LlamaForCausalLM) -> None:
    """Let the last layer of `trunk` take `read`; its parameters keep their names and places."""
    layers = trunk.model.layers
    with torch.device("meta"):
        last = LastLayer(trunk.config, len(layers) - 1)
    last.load_state_dict(layers[-1].state_dict(), assign=True)
    layers[-1] = last


class ExactRotary(LlamaRotaryEmbedding):
    """Rotary positions whose frequencies stay float32 if the module around them is cast.

    Args:
        config: configuration of the trunk.
        rounds_to_bfloat16: round the frequencies once, to reproduce runs that rounded them.
    """

    def __init__(self, config: LlamaConfig, rounds_to_bfloat16: bool) -> None:
        super().__init__(config)
        self._rounds_to_bfloat16 = rounds_to_bfloat16
        self.materialise_buffers(self.inv_freq.device)

    def materialise_buffers(self, device: torch.device) -> None:
        """Recompute the frequencies on `device`: a network built on the meta device has none."""
        with torch.device(device):
            frequencies, _ = self.compute_default_rope_parameters(self.config)
        # RLinf's runs cast the whole module, which rounds these frequencies: 0.37 rad of phase at
        # position 300.
        if self._rounds_to_bfloat16:
            frequencies = frequencies.bfloat16().float()
        self.inv_freq, self.original_inv_freq = (
            nn.Buffer(frequencies, persistent=False),
            nn.Buffer(frequencies.clone(), persistent=False),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.materialise_buffers(self.inv_freq.device)
        return self


def build_trunk(config: LlmConfig, *, is_causal: bool) -> LlamaForCausalLM:
    """Build a Llama with the public parameter names.

    The rest of its configuration is the library's defaults.
    """
    llama = LlamaConfig(
        vocab_size=config.table_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        rms_norm_eps=config.rms_norm_eps,
        pad_token_id=config.pad_token_id,
        use_cache=False,
    )
    # read by every attention implementation and mask function of transformers
    llama.is_causal = is_causal
    # rms_norm_eps is the library's 1e-6, not Llama-2's 1e-5: the public checkpoints were
    # converted and fine-tuned with it.
    trunk = LlamaForCausalLM(llama)  # type: ignore[no-untyped-call]
    trunk.model.rotary_emb = ExactRotary(llama, config.rope_inv_freq_dtype == "bfloat16")
    # masks made here are boolean, which eager attention would add as 0 and 1
    use_given_masks(trunk)
    make_last_layer_selective(trunk)
    return trunk


RunTrunk: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""(embedded tokens [B, L, D], lengths [B], or None if nothing is padding) -> hidden states [B, L, D]."""


def require_bidirectional(attend: RunTrunk, width: int, like: Tensor) -> None:
    """Raise ConfigError unless the first of three tokens sees the last one, with a mask and without.

    Args:
        attend: computes the trunk.
        width: D.
        like: a parameter, whose device and dtype are used.
    """
    tokens = (
        torch.linspace(-1.0, 1.0, 3 * width, device=like.device).view(1, 3, width).to(like.dtype)
    )
    changed = torch.cat([tokens[:, :2], -tokens[:, 2:]], dim=1)
    lengths = torch.full((1,), 3, device=like.device)
    with torch.no_grad(), Uncompiled():
        # each sequence alone: rows of one batch may be rounded differently
        (masked, masked_changed), (whole, whole_changed) = (
            [attend(sequence, given)[0, 0] for sequence in (tokens, changed)]
            for given in (lengths, None)
        )
        sees = (masked != masked_changed).any() & (whole != whole_changed).any()
    # one look at both pairs, because the host waits for it
    if torch.equal(sees, torch.zeros_like(sees)):
        raise ConfigError(
            "the trunk attends causally: its first token does not see its last one. OpenVLA-OFT "
            "decodes in parallel and needs bidirectional attention; a causal trunk raises no error "
            "and loses tens of points. Use the attention and the mask that the network was built "
            "with."
        )


def materialise(network: nn.Module, device: torch.device | str) -> None:
    """Compute the buffers (positions, constants) that no checkpoint holds, for a network built on
    the meta device.
    """
    for module in network.modules():
        compute: Any = getattr(module, "materialise_buffers", None)
        if compute is not None:
            compute(torch.device(device))
    left = [
        name
        for name, tensor in (*network.named_parameters(), *network.named_buffers())
        if tensor.is_meta
    ]
    if left:
        raise ConfigError(
            f"{len(left)} tensors were neither loaded nor computed: {', '.join(left[:8])}."
        )
