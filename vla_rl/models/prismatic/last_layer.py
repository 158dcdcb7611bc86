"""The trunk's last layer, computed only where its output is read.

    all layers before it       all positions: the next one needs keys and values of each
    the last layer             keys and values of all positions; the rest only of those that are read

An action is read at a few positions after hundreds of patches. The results equal those of the whole
layer, because no position needs another's output of the same layer.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from vla_rl.models.attention import is_causal
from vla_rl.models.prismatic.sequence import gather_rows


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
        seen = self.input_layernorm(hidden_states)
        residual = residual + self._attend(
            seen, read, given["attention_mask"], *given["position_embeddings"]
        )
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output

    def _attend(
        self, seen: Tensor, read: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        attention = self.self_attn
        queries, keys, values = (
            project(rows).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for project, rows in (
                (attention.q_proj, gather_rows(seen, read)),
                (attention.k_proj, seen),
                (attention.v_proj, seen),
            )
        )
        cos, sin = (table.expand(len(seen), -1, -1) for table in (cos, sin))
        queries, _ = apply_rotary_pos_emb(
            queries, queries, gather_rows(cos, read), gather_rows(sin, read)
        )
        keys, _ = apply_rotary_pos_emb(keys, keys, cos, sin)
        mask = self._seen_from(read, seen.shape[1], mask)
        found = nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=attention.scaling
        )
        attended: Tensor = attention.o_proj(found.transpose(1, 2).flatten(2))
        return attended

    def _seen_from(self, read: Tensor, num_positions: int, mask: Tensor | None) -> Tensor | None:
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
