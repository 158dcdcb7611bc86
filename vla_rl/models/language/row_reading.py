"""Rows of different lengths through a trunk: on padded lines, or end to end on one.

about one length        ████████   each row on a line; causal attention needs no mask
                        ██████··
one much longer         ████████████ ██ ███   all on one line, where none sees another
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vla_rl.errors import ConfigError
from vla_rl.models.attention import PackedRows

RowInputs = Callable[[Tensor, Sequence[int]], dict[str, Tensor]]
"""Returns the trunk's inputs for whole rows, of the tokens int64 [N, W] on their lines, on the
host, and of the place of each row's first token in the flattened lines."""


def read_rows(
    trunk: Any, rows: Sequence[Tensor], inputs: RowInputs, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return hidden states, [L, feature_size], and each row's offset in them, int64 [B].

    Args:
        trunk: the part of a network from embedded tokens to hidden states.
        rows: tokens of each row, int64 [P].
        inputs: the trunk's inputs.
        device: device of the trunk.

    Raises: ConfigError if rows are read end to end and would see each other.
    """
    lengths = [len(row) for row in rows]
    # padding would take more than the rows: the two shortest fit into the space of the longest
    if sum(sorted(lengths)[:2]) <= max(lengths) and len(rows) > 1:
        return _read_packed(trunk, rows, inputs, device)
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    starts = torch.arange(len(rows)) * tokens.shape[1]
    hidden: Tensor = trunk(**inputs(tokens, starts.tolist()), use_cache=False).last_hidden_state
    return hidden.flatten(0, 1), starts


def _read_packed(
    trunk: Any, rows: Sequence[Tensor], inputs: RowInputs, device: torch.device
) -> tuple[Tensor, Tensor]:
    lengths = [len(row) for row in rows]
    packed = PackedRows.of(lengths, device)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    given = inputs(torch.cat(list(rows))[None], starts.tolist())
    hidden: Tensor = trunk(**given, use_cache=False, packed=packed).last_hidden_state
    if not packed.are_read:
        raise ConfigError(
            f"{type(trunk).__name__} does not hand the rows of a line on to its attention, so "
            "they would see each other; set no limit of tokens for its micro-batches"
        )
    return hidden[0], starts
