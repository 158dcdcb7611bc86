"""Stochastic actors with an entropy bonus: SAC, and DSRL as SAC on the noise of a flow policy.

B rows of actions with A numbers each. An action is the tanh of a Gaussian number times a bound, so
that no number of an action leaves [-bound, bound] (DSRL, arXiv:2506.15799: the first noise w of a
frozen flow policy, |w| <= 1 to 2.5).
"""

import math
from typing import NamedTuple

from vla_rl.algorithms.tensors import Tensor, full_precision, require_shape, torch


class SampledActions(NamedTuple):
    """Actions that an actor drew, with their log-densities.

    Attributes:
        actions: float [B, A].
        log_probs: float [B], log-density in the units of the actions, added up over A.
    """

    actions: Tensor
    log_probs: Tensor


def sample_squashed(
    mean: Tensor, log_std: Tensor, noise: Tensor, *, bound: float = 1.0
) -> SampledActions:
    """Draw actions from a tanh-Gaussian, with a gradient through the draw.

        u = mean + exp(log_std) * noise,    a = bound * tanh(u)
        log pi(a) = sum_A [log N(u; mean, std) - log(1 - tanh(u)^2) - log bound]

    SAC, Haarnoja et al. 2018, arXiv:1801.01290, eq. 21 (appendix C).

    Args:
        mean: float [B, A], before the tanh.
        log_std: float [B, A], natural log of the standard deviation.
        noise: float [B, A], standard normal; zeros give the greedy action.
        bound: largest action, > 0.

    Returns: actions and log-probs. Raises: ValueError for shapes that differ.
    """
    _require_actions(mean, log_std, noise, "noise")
    mean, log_std = full_precision(mean), full_precision(log_std)
    before = mean + log_std.exp() * noise
    log_probs = _gaussian(noise, log_std) - _squashing(before, bound)
    return SampledActions(bound * torch.tanh(before), log_probs.sum(dim=1))


def squashed_log_probs(
    mean: Tensor, log_std: Tensor, actions: Tensor, *, bound: float = 1.0, margin: float = 1e-6
) -> Tensor:
    """Compute the log-density of stored actions under a tanh-Gaussian.

    The density of `sample_squashed`, at u = atanh(a / bound).

    Args:
        mean: float [B, A], before the tanh.
        log_std: float [B, A].
        actions: float [B, A], in [-bound, bound].
        bound: largest action.
        margin: an action nearer to the bound than this share of it is moved away, because its u is
            infinite.

    Returns: float [B]. Raises: ValueError for shapes that differ.
    """
    _require_actions(mean, log_std, actions, "actions")
    mean, log_std = full_precision(mean), full_precision(log_std)
    inside = (full_precision(actions) / bound).clamp(-1.0 + margin, 1.0 - margin)
    before = torch.atanh(inside)
    standard = (before - mean) * torch.exp(-log_std)
    return (_gaussian(standard, log_std) - _squashing(before, bound)).sum(dim=1)


def gaussian_log_probs(mean: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
    """Compute the log-density of actions under a diagonal Gaussian, added up over A.

    Args:
        mean: float [B, A].
        log_std: float [B, A], natural log of the standard deviation.
        actions: float [B, A].

    Returns: float [B]. Raises: ValueError for shapes that differ.
    """
    _require_actions(mean, log_std, actions, "actions")
    mean, log_std = full_precision(mean), full_precision(log_std)
    return _gaussian((actions - mean) * torch.exp(-log_std), log_std).sum(dim=1)


def soft_actor_loss(values: Tensor, log_probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Raise the value of drawn actions and their entropy.

        L = mean_b [temperature * log pi(a_b) - Q(s_b, a_b)],    a drawn by `sample_squashed`

    SAC, arXiv:1812.05905, eq. 7. DSRL and RLPD have the same; DSRL's verl-vla form has a
    temperature of 0.

    Args:
        values: float [B], of `reduce_critics`; the gradient passes through the actions.
        log_probs: float [B].
        temperature: float [] or a number, >= 0; a constant here.

    Returns: float []. Raises: ValueError for shapes that differ or no row.
    """
    require_shape("values", values, (None,), "[B]")
    require_shape("log_probs", log_probs, tuple(values.shape), "[B]")
    if values.shape[0] < 1:
        raise ValueError("the batch has no row; expected at least one; skip the step instead.")
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach()
    return (temperature * log_probs - values).mean()


def temperature_loss(
    log_temperature: Tensor, log_probs: Tensor, *, target_entropy: float
) -> Tensor:
    """Compute the loss of the temperature that holds the entropy near a target.

        L = -exp(log_temperature) * mean_b [log pi(a_b) + target_entropy]

    SAC, arXiv:1812.05905, eq. 18, as in d3rlpy. stable-baselines3 multiplies by log_temperature
    itself: the gradient has the same sign and is 1 / temperature times as large.

    Args:
        log_temperature: float [], the only input with a gradient.
        log_probs: float [B].
        target_entropy: in nats, usually -A; -16 for DSRL in RLinf.

    Returns: float [].
    """
    require_shape("log_temperature", log_temperature, (), "[]")
    return -log_temperature.exp() * (log_probs.detach().mean() + target_entropy)


def _gaussian(standard: Tensor, log_std: Tensor) -> Tensor:
    return -0.5 * standard.square() - log_std - 0.5 * math.log(2.0 * math.pi)


def _squashing(before: Tensor, bound: float) -> Tensor:
    # log(1 - tanh(u)^2) written so that it does not round to -inf where tanh(u) rounds to 1
    slope = 2.0 * (math.log(2.0) - before - torch.nn.functional.softplus(-2.0 * before))
    return slope + math.log(bound)


def _require_actions(mean: Tensor, log_std: Tensor, third: Tensor, name: str) -> None:
    require_shape("mean", mean, (None, None), "[B, A]")
    require_shape("log_std", log_std, tuple(mean.shape), "[B, A]")
    require_shape(name, third, tuple(mean.shape), "[B, A]")
