"""Attention of every transformer here: sdpa under the mask that a policy made, and no other.

    mask [B, 1, Q, K]    that mask
    mask [B, K]          padding: spelt out as the mask that it stands for
    none                 causal: rows that are padded on the right need no mask
    none, `packed`       causal within each of several rows that lie end to end on one line

transformers' own "sdpa" looks at the numbers of a padding mask, or of the positions, to find out
whether it needs a mask; on a GPU every such look waits for the device. The host knows the lengths.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GIVEN_MASK: Final = "vla_rl_given_mask"
"""Name of this attention in a network's configuration. No mask function is registered for it, so
transformers passes masks [B, 1, Q, K] on, and makes none."""


@dataclass
class PackedRows:
    """Rows that lie end to end on one line, without a gap.

    Attributes:
        lengths: number of positions of each.
        are_read: whether a layer has read them; one that drops this argument would let each row see
            those before it.
    """

    lengths: list[int]
    are_read: bool = False


def use_given_masks(network: Any) -> None:
    """Let a network of transformers attend under the masks that it is given."""
    if network.config._attn_implementation != GIVEN_MASK:
        network.set_attn_implementation(GIVEN_MASK)
        network.base_model.register_forward_pre_hook(_spell_out_padding, with_kwargs=True)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedRows | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Compute attention of queries [B, H, Q, D], by transformers' interface.

    Args:
        packed: rows of the only line (B = 1); they are read one after another, so that no mask of
            the line's square is made.
    """
    if packed is None:
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
        return whole
    packed.are_read = True
    columns = (torch.split(each, packed.lengths, dim=2) for each in (query, key, value))
    found = [
        sdpa_attention_forward(module, queries, keys, values, None, **given)[0]
        for queries, keys, values in zip(*columns, strict=True)
    ]
    return torch.cat(found, dim=1), None


def _spell_out_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replace a padding mask [B, K], which transformers would drop, by the mask [B, 1, Q, K]."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    seen = kwargs.get("input_ids")
    if seen is None:
        seen = kwargs["inputs_embeds"]
    visible = mask.bool()[:, None, None, :].expand(-1, 1, seen.shape[1], -1)
    if getattr(module.config, "is_causal", True):
        place = torch.arange(mask.shape[1], device=mask.device)
        visible = visible & (place <= place[-seen.shape[1] :, None])
    return args, {**kwargs, "attention_mask": visible}


AttentionInterface.register(GIVEN_MASK, attend)
