"""The Llama trunk of transformers, with causal or bidirectional attention and exact positions.

Two faults ruin a policy without an error: a causal mask in OpenVLA-OFT (tens of points), and rotary
frequencies rounded by a cast to bfloat16 (a phase error of 0.4 rad at position 300). The first is
checked by `refuse_causal`; the second cannot happen to `ExactRotary`.
"""

from collections.abc import Callable
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vla_rl.errors import ConfigError
from vla_rl.models.attention import use_given_masks
from vla_rl.models.prismatic.compiled_blocks import Uncompiled
from vla_rl.models.prismatic.config import LlmConfig
from vla_rl.models.prismatic.last_layer import make_last_layer_selective


class ExactRotary(LlamaRotaryEmbedding):
    """Rotary positions whose frequencies stay float32 if the module around them is cast.

    Args:
        config: configuration of the trunk.
        rounds_to_bfloat16: round the frequencies once, to reproduce runs that rounded them.
    """

    def __init__(self, config: LlamaConfig, rounds_to_bfloat16: bool) -> None:
        super().__init__(config)
        self._rounds_to_bfloat16 = rounds_to_bfloat16
        self.materialise(self.inv_freq.device)

    def materialise(self, device: torch.device) -> None:
        """Recompute the frequencies on `device`: a network built on the meta device has none."""
        with torch.device(device):
            frequencies, _ = self.compute_default_rope_parameters(self.config)
        if self._rounds_to_bfloat16:
            frequencies = frequencies.bfloat16().float()
        self.inv_freq, self.original_inv_freq = (
            nn.Buffer(frequencies, persistent=False),
            nn.Buffer(frequencies.clone(), persistent=False),
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.materialise(self.inv_freq.device)
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
    trunk = LlamaForCausalLM(llama)  # type: ignore[no-untyped-call]
    trunk.model.rotary_emb = ExactRotary(llama, config.rope_inv_freq_dtype == "bfloat16")
    # masks made here are boolean, which eager attention would add as 0 and 1
    use_given_masks(trunk)
    make_last_layer_selective(trunk)
    return trunk


Attend: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""(embedded tokens [B, L, D], lengths [B], or None if nothing is padding) -> hidden states [B, L, D]."""


def refuse_causal(attend: Attend, width: int, like: Tensor) -> None:
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
        compute: Any = getattr(module, "materialise", None)
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
