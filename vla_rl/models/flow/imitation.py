"""Imitation of chunks: conditional flow matching (Lipman et al. 2023, arXiv:2210.02747).

    x = t noise + (1 - t) chunk,   target velocity = noise - chunk,   t ~ 0.999 Beta(1.5, 1) + 0.001

Times lean towards noise, as in openpi: there the observation decides most.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vla_rl.engines.device_lane import to_device
from vla_rl.models.flow.network import FlowInputs, Prefix

ALPHA: Final = 1.5
"""First parameter of the Beta distribution of times; the second is 1."""

TIME_RANGE: Final = 0.999
SMALLEST_TIME: Final = 0.001


class Noised(NamedTuple):
    """M noised versions of each of N chunks.

    Attributes:
        x: float32 [N, M, H, P].
        time: float32 [N, M].
        target: float32 [N, M, H, P], the velocity to learn.
    """

    x: Tensor
    time: Tensor
    target: Tensor


def imitation_errors(
    network: Any,
    prefix: Prefix,
    inputs: FlowInputs,
    numbers: Tensor,
    action_dim: int,
    num_draws: int,
) -> Tensor:
    """Return the squared errors of the velocity towards whole chunks, float32 [N, H * D].

    Args:
        network: a `FlowNetwork`.
        prefix: what it has read of the N observations.
        inputs: with noise and times, if they are not to be drawn.
        numbers: float32 [N, H * D], the chunks.
        action_dim: D.
        num_draws: as in `draw_noised`.

    Raises: ValueError for chunks of other lengths.
    """
    chunk = pad_chunks(numbers, action_dim, (network.horizon, network.action_dim))
    noised = draw_noised(chunk, num_draws, inputs.noise, inputs.time)
    return weigh_padding(velocity_errors(network, prefix, noised), action_dim).flatten(1)


def require_rows(actions: np.ndarray, horizon: int, action_dim: int) -> None:
    """Raise ValueError unless actions are [B, h, action_dim] with h up to the horizon."""
    rows, width = actions.shape[1:] if actions.ndim == 3 else (0, 0)
    if not 1 <= rows <= horizon or width != action_dim:
        raise ValueError(
            f"actions are {list(actions.shape)}, expected [B, {horizon}, {action_dim}]: whole chunks for "
            "imitation, or their first rows."
        )


def pad_chunks(numbers: Tensor, action_dim: int, shape: tuple[int, int]) -> Tensor:
    """Return whole chunks with zeros in the padded dimensions, [N, H * action_dim] to [N, H, P].

    Args:
        numbers: of the robot's dimensions alone.
        action_dim: number of these.
        shape: H and P.

    Raises: ValueError for chunks of other lengths.
    """
    horizon, width = shape
    if numbers.shape[1] != horizon * action_dim:
        raise ValueError(
            f"imitation got {numbers.shape[1] // action_dim} rows, expected whole chunks of {horizon}; "
            "without `drawn` nothing else can be scored."
        )
    return pad(numbers.view(-1, horizon, action_dim), (0, width - action_dim))


def draw_noised(
    chunk: Tensor, num_draws: int, noise: Tensor | None = None, time: Tensor | None = None
) -> Noised:
    """Mix chunks with noise.

    Args:
        chunk: float32 [N, H, P].
        num_draws: M; ignored if noise is given.
        noise: float32 [N, M, H, P]; None draws it from torch's own state, as dropout would.
        time: float32 [N, M]; None draws it.
    """
    if noise is None:
        # on the CPU, so that the same seed gives the same draws on every device
        drawn = torch.randn(len(chunk), num_draws, *chunk.shape[1:])
        noise = to_device(drawn, chunk.device)
    if time is None:
        # the inverse of the cumulative distribution t^alpha of Beta(alpha, 1)
        uniforms = torch.rand(noise.shape[:2])
        time = to_device(TIME_RANGE * uniforms ** (1.0 / ALPHA) + SMALLEST_TIME, chunk.device)
    clean, share = chunk[:, None], time[:, :, None, None]
    return Noised(share * noise + (1.0 - share) * clean, time, noise - clean)


def velocity_errors(network: Any, prefix: Prefix, noised: Noised) -> Tensor:
    """Return the squared errors of a network's velocity at noised chunks, float32 [N, H, P]: means over the draws.

    Args:
        network: a `FlowNetwork`.
        prefix: what it has read of the N observations, each once for all its draws.
        noised: the chunks.
    """
    num_chunks, num_draws = noised.time.shape
    index = torch.arange(num_chunks, device=noised.x.device).repeat_interleave(num_draws)
    velocity = network.velocity(
        prefix.rows(index) if num_draws > 1 else prefix,
        noised.x.flatten(0, 1),
        noised.time.flatten(),
    )
    errors: Tensor = velocity.view_as(noised.target) - noised.target
    return errors.square().mean(1)


def weigh_padding(squared: Tensor, action_dim: int) -> Tensor:
    """Spread errors of padded dimensions over the robot's, [N, H, P] to [N, H, action_dim].

    The mean over a row of the result is the mean over the whole padded row.
    """
    width = squared.shape[-1]
    own, padded = squared[..., :action_dim], squared[..., action_dim:]
    return own * (action_dim / width) + padded.sum(-1, keepdim=True) / width
