"""Sampling tokens from logits with separate noise for each row.

So a decision can be repeated anywhere.

A row's noise comes from its `Sampling.seed` alone, through a counter-based generator on the CPU;
the same logits and seed give the same tokens on every device, in every batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.transfers import to_device
from vla_rl.types import Sampling


def seeded_uniforms(samplings: Sequence[Sampling], num_tokens: int) -> Tensor:
    """Draw float64 [B, num_tokens] in [0, 1), each row from its own `Sampling.seed`."""
    rows = [
        np.random.Generator(np.random.Philox(sampling.seed)).random(num_tokens)
        for sampling in samplings
    ]
    return torch.from_numpy(np.stack(rows))


def choose_tokens(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution; greedy rows take the likeliest token, or the
    one nearest to the mean (`Sampling.by_mean`).

    Args:
        logits: float [B, T, V], before temperature.
        samplings: one per row.
        uniforms: float64 [B, T] in [0, 1), needed unless these are the first T tokens of a
            decision; None draws them.

    Returns: indices into V, int64 [B, T], and their log-probs after temperature, float32 [B, T].
    """
    uniforms = seeded_uniforms(samplings, logits.shape[1]) if uniforms is None else uniforms
    columns = sampling_columns(samplings, logits.device)
    chosen, log_probs = choose(logits, *columns, to_device(uniforms, logits.device))
    by_mean = torch.tensor([sampling.greedy and sampling.by_mean for sampling in samplings])
    if not by_mean.any():
        return chosen, log_probs
    tempered = tempered_log_probs(logits, columns[0])
    places = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)
    middle = (tempered.exp() @ places).round().long()
    chosen = torch.where(to_device(by_mean, logits.device)[:, None], middle, chosen)
    return chosen, tempered.gather(-1, chosen[..., None])[..., 0]


def sampling_columns(samplings: Sequence[Sampling], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return temperatures, float32 [B], and whether each row is greedy, bool [B], on a device.

    Raises: ValueError for a temperature of 0.
    """
    for sampling in samplings:
        if not sampling.temperature > 0.0:
            raise ValueError(
                f"Sampling.temperature is {sampling.temperature}, expected > 0; use "
                "greedy=True instead."
            )
    temperatures = torch.tensor([sampling.temperature for sampling in samplings])
    is_greedy = torch.tensor([sampling.greedy for sampling in samplings])
    return to_device(temperatures, device), to_device(is_greedy, device)


def choose(
    logits: Tensor, temperatures: Tensor, is_greedy: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same as `choose_tokens`, without waiting on the host.

    All inputs are on the logits' device.
    """
    log_probs = tempered_log_probs(logits, temperatures)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    total = cumulative[..., -1:]
    # rounding may lift the noise to the total, which no token's sum exceeds; take the last possible
    # token then
    noise = torch.minimum(
        uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    sampled = torch.searchsorted(cumulative, noise, right=True)[..., 0].clamp(
        max=logits.shape[2] - 1
    )
    chosen = torch.where(is_greedy[:, None], log_probs.argmax(dim=-1), sampled)
    return chosen, log_probs.gather(-1, chosen[..., None])[..., 0]


def likeliest_tokens(
    logits: Tensor, samplings: Sequence[Sampling], num: int
) -> tuple[Tensor, Tensor]:
    """Return ids int64 [B, n] and log-probs float32 [B, n], after temperature, of the tokens of
    highest probability; `pairs_of` leaves out the impossible ones.

    Args:
        logits: float [B, 1, V], before temperature; -inf marks an impossible token.
        samplings: one per row.
        num: maximum number of tokens for each row.
    """
    temperatures, _ = sampling_columns(samplings, logits.device)
    log_probs = tempered_log_probs(logits, temperatures)[:, 0]
    values, tokens = log_probs.topk(min(num, log_probs.shape[1]))
    return tokens, values


def pairs_of(tokens: Tensor, log_probs: Tensor) -> list[list[tuple[int, float]]]:
    """Return the possible tokens of each row with their log-probs, from tensors on the host."""
    rows = zip(tokens.tolist(), log_probs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -torch.inf] for row in rows]


def tempered_log_probs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log softmax(logits / temperature), float32 [B, T, V], one temperature per row."""
    return torch.log_softmax(logits.float() / temperatures.float()[:, None, None], dim=-1)
