"""Attention of every transformer here: sdpa under the mask that a policy made, without any other.

    mask [B, 1, Q, K]    that mask; with Q = 1, what every query sees
    mask [B, K]          padding: spelt out as the mask that it stands for
    none                 causal: rows that are padded on the right need no mask
                         both ways, if the configuration says so: every position of the row
    none, `packed`       causal within each of several rows that lie end to end on one line

transformers' own "sdpa" looks at the numbers of a padding mask, or of the positions, to find out
whether it needs a mask; on a GPU every such look waits for the device. The host knows the lengths.

Heads that share keys (grouped-query attention) read them without a copy for each head while replies
are generated, one token at a time.

Packed rows are read by one call of the flash kernel for variable lengths if it takes them
(`takes_all_rows`), else one after another. Neither makes a mask of the line's square.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from vla_rl.engines.device_lane import to_device

GIVEN_MASK: Final = "vla_rl_given_mask"
"""Name of this attention in a network's configuration. No mask function is registered for it, so
transformers passes masks [B, 1, Q, K] on, and makes none."""

LARGEST_HEAD: Final = 256
"""Dimensions of a head up to which there is a flash kernel."""

HAS_GROUPED_HEADS: Final = "enable_gqa" in signature(varlen_attn).parameters
"""Whether the kernel for variable lengths takes fewer heads of keys than of queries: not that of
torch 2.11, on which the GPU campaign may run."""


@dataclass
class PackedRows:
    """Rows that lie end to end on one line, without a gap.

    Attributes:
        lengths: number of positions of each.
        offsets: position at which each begins, and the one after the last; int32 [B + 1], on the
            network's device.
        are_read: whether a layer has read them; one that drops this argument would let each row see
            those before it.

    Example:
        Rows of 3 and 5 tokens on a line of 8:

        PackedRows(lengths=[3, 5], offsets=tensor([0, 3, 8], dtype=torch.int32))
    """

    lengths: list[int]
    offsets: Tensor
    are_read: bool = False

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device) -> Self:
        """Return rows of these lengths; their offsets are uploaded once for all layers."""
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        return cls(lengths, to_device(ends, device))


def use_given_masks(network: Any) -> None:
    """Let a network of transformers attend under the masks that it is given."""
    if network.config._attn_implementation != GIVEN_MASK:
        # The hook sits on the base model, because that is what our policies call: a hook on the
        # whole network would never run.
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
        packed: rows of the only line (B = 1).
    """
    # transformers would ask the module, and every Llama's says True
    if given.get("is_causal") is None:
        given["is_causal"] = is_causal(module.config)
    if packed is None:
        if attention_mask is not None and _shares_heads(query, key, attention_mask):
            return _attend_in_groups(query, key, value, attention_mask, given.get("scaling")), None
        whole: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **given
        )
        return whole
    packed.are_read = True
    if takes_all_rows(query):
        return _attend_at_once(query, key, value, packed, given.get("scaling")), None
    # Elsewhere a kernel for each row: a mask of the line's square would grow with the square of
    # all tokens of a micro-batch.
    columns = (torch.split(each, packed.lengths, dim=2) for each in (query, key, value))
    found = [
        sdpa_attention_forward(module, queries, keys, values, None, **given)[0]
        for queries, keys, values in zip(*columns, strict=True)
    ]
    return torch.cat(found, dim=1), None


def _shares_heads(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Return whether each row has one query, for which some heads share keys under one mask."""
    return query.shape[2] == 1 and query.shape[1] > key.shape[1] and mask.shape[1] == 1


def _attend_in_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Return the attention of one query for each row and head, [B, 1, H, D].

    The queries of heads that share keys become several queries of one head. transformers would
    repeat keys and values for each head under a mask, which takes longer than all the rest of a
    decoding step once rows are long.
    """
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    found = functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=mask, scale=scale
    )
    return found.reshape(rows, 1, heads, size)


def is_causal(config: Any) -> bool:
    """Return whether a position sees those before it only; False by `is_causal` alone."""
    return bool(getattr(config, "is_causal", True))


def takes_all_rows(query: Tensor) -> bool:
    """Return whether the flash kernel for variable lengths takes queries of this kind: on a GPU
    since Ampere, in half precision.
    """
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        # other widths are padded by sdpa, before it calls the same kernel
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= LARGEST_HEAD
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_at_once(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, scale: float | None
) -> Tensor:
    """Return the attention of all rows, [1, L, H, D], by one kernel."""
    longest = max(packed.lengths)
    # torch 2.11 has no option for grouped heads, so keys and values are repeated there.
    options: dict[str, Any] = {"enable_gqa": True} if HAS_GROUPED_HEADS else {}
    if not HAS_GROUPED_HEADS:
        num_queries = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, num_queries), repeat_kv(value, num_queries)
    rows = varlen_attn(
        query[0].transpose(0, 1),  # [L, H, D]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packed.offsets,
        packed.offsets,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        **options,
    )
    assert isinstance(rows, Tensor)  # a pair only if more was asked for
    return rows[None]


def _spell_out_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Replace a padding mask [B, K], which transformers would drop, by the mask [B, 1, Q, K]."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    inputs = kwargs.get("input_ids")
    if inputs is None:
        inputs = kwargs["inputs_embeds"]
    visible = mask.bool()[:, None, None, :].expand(-1, 1, inputs.shape[1], -1)
    if is_causal(module.config):
        positions = torch.arange(mask.shape[1], device=mask.device)
        visible = visible & (positions <= positions[-inputs.shape[1] :, None])
    return args, {**kwargs, "attention_mask": visible}


AttentionInterface.register(GIVEN_MASK, attend)
