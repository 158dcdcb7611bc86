"""Targets of critics that learn from stored transitions.

A transition is one decision: from its observation, C control steps at most were executed, n of them
before the episode ended or the policy was asked again. Its reward is the discounted sum of those n
rewards, and its successor is worth gamma^n times its value. A time limit truncates: the successor's
value counts. A termination ends: it does not.

B rows, E critics. Values carry the critics first, [E, B], as stacked networks give them.
"""

from collections.abc import Iterable
from typing import Literal, TypeAlias

from vla_rl.algorithms.tensors import Tensor, full_precision, require_shape, torch

Reduction: TypeAlias = Literal["min", "mean", "first"]
"""Name of the value of several critics: the least (TD3's clipped double Q), the mean, the first's."""


def chunk_returns(rewards: Tensor, num_rewards: Tensor, *, gamma: float) -> Tensor:
    """Sum the discounted rewards of the control steps that a decision executed.

        R = sum_{j < n} gamma^j r_j

    n-step return of Sutton and Barto 2018, eq. 7.1, with n the executed part of the action chunk
    (RLT, arXiv:2604.23073).

    Args:
        rewards: float [B, C], of each control step; what lies behind n is not read.
        num_rewards: int64 [B], n in [1, C], control steps that were executed.
        gamma: discount of one control step, in (0, 1].

    Returns: float [B]. Raises: ValueError for an n out of range or a gamma out of range.
    """
    _require_gamma(gamma)
    require_shape("rewards", rewards, (None, None), "[B, C]")
    num_rows, horizon = rewards.shape
    _require_lengths(num_rewards, num_rows, horizon)
    rewards = full_precision(rewards)
    steps = torch.arange(horizon, device=rewards.device)
    discounts = gamma ** steps.to(rewards.dtype)
    # `where` and not a product: rows are padded with anything, NaN too
    executed = steps < num_rewards.to(rewards.device)[:, None]
    return torch.where(executed, rewards * discounts, 0.0).sum(dim=1)


def bootstrap_discounts(num_rewards: Tensor, *, gamma: float) -> Tensor:
    """Compute gamma^n, what the successor's value is multiplied by.

    Args:
        num_rewards: int64 [B], n >= 1, control steps from this decision to the next.
        gamma: discount of one control step, in (0, 1].

    Returns: float32 [B]. Raises: ValueError for an n below 1 or a gamma out of range.
    """
    _require_gamma(gamma)
    require_shape("num_rewards", num_rewards, (None,), "[B]")
    _require_lengths(num_rewards, num_rewards.shape[0], None)
    # in float64: float32 powers of .999 are off in the seventh digit at n = 20
    return (gamma ** num_rewards.double()).float()


def reduce_critics(
    values: Tensor, reduction: Reduction = "min", members: Tensor | None = None
) -> Tensor:
    """Reduce the values of an ensemble to one for each row.

    The minimum of two is TD3's (arXiv:1802.09477, eq. 10); the minimum of a random subset REDQ's
    (arXiv:2101.05982, algorithm 1) and RLPD's (arXiv:2302.02948), with 2 of 10.

    Args:
        values: float [E, B].
        reduction: "min", "mean" or "first".
        members: int64 [K], the critics that are asked, drawn anew for each update by
            `draw_members`; None: all.

    Returns: float [B], with a gradient. Raises: ValueError for an unknown reduction.
    """
    require_shape("values", values, (None, None), "[E, B]")
    if members is not None:
        values = values[members.to(values.device)]
    if reduction == "min":
        return values.min(dim=0).values
    if reduction == "mean":
        return values.mean(dim=0)
    if reduction == "first":
        return values[0]
    raise ValueError(f'reduction is {reduction!r}, expected "min", "mean" or "first".')


def draw_members(num_critics: int, num_drawn: int, *, seed: int) -> Tensor:
    """Draw different critics of an ensemble (REDQ, arXiv:2101.05982; RLPD, arXiv:2302.02948).

    Args:
        num_critics: E.
        num_drawn: K, in [1, E].
        seed: of this one draw, such as a hash of the run's seed and the gradient step, so that a
            run that goes on draws the same.

    Returns: int64 [K], ascending. Raises: ValueError if K is out of range.
    """
    if not 1 <= num_drawn <= num_critics:
        raise ValueError(
            f"{num_drawn} critics of {num_critics} cannot be drawn; expected 1 to {num_critics}."
        )
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(num_critics, generator=generator)[:num_drawn].sort().values


def td_targets(
    returns: Tensor,
    discounts: Tensor,
    terminated: Tensor,
    next_values: Tensor,
    *,
    value_range: tuple[float, float] | None = None,
) -> Tensor:
    """Compute what a critic should say of the stored actions.

        y = R + gamma^n (1 - terminated) V(next), clamped to value_range

    V(next) is `reduce_critics` of the target critics at the next action: of the target actor with
    noise (`noisy_target_actions`: TD3, RLT), or of the actor, with `soft_values` (SAC, RLPD, DSRL).

    Args:
        returns: float [B], of `chunk_returns`.
        discounts: float [B], of `bootstrap_discounts`.
        terminated: bool [B], True where the episode ended in a success or failure; False where a
            time limit cut it off.
        next_values: float [B]; not read where terminated, so it may hold anything there.
        value_range: least and largest return that is possible, such as (0, 1) for a reward of 1 at
            a success; what a critic extrapolates beyond it is not passed on. None: no bound.

    Returns: float [B], a constant. Raises: ValueError for shapes that differ.
    """
    rows = (returns.shape[0] if returns.ndim else None,)
    for name, tensor in (
        ("returns", returns),
        ("discounts", discounts),
        ("terminated", terminated),
        ("next_values", next_values),
    ):
        require_shape(name, tensor, rows, "[B]")
    following = torch.where(terminated, 0.0, discounts * full_precision(next_values))
    targets = (full_precision(returns) + following).detach()
    if value_range is None:
        return targets
    low, high = value_range
    if not low < high:
        raise ValueError(f"value_range is {value_range}, expected two numbers, the lower first.")
    return targets.clamp(low, high)


def noisy_target_actions(
    actions: Tensor, noise: Tensor, *, scale: float, noise_bound: float, action_bound: float = 1.0
) -> Tensor:
    """Smooth a target over actions near the target actor's (TD3, arXiv:1802.09477, eq. 14).

        a' = clamp(mu(s') + clamp(scale * noise, +-noise_bound), +-action_bound)

    Args:
        actions: float [B, A], the target actor's.
        noise: float [B, A], standard normal.
        scale: its standard deviation; 0.2 in the paper, 0 for none.
        noise_bound: largest change of one number; 0.5 in the paper.
        action_bound: largest action.

    Returns: float [B, A].
    """
    require_shape("noise", noise, tuple(actions.shape), "[B, A]")
    moved = actions + (noise * scale).clamp(-noise_bound, noise_bound)
    return moved.clamp(-action_bound, action_bound)


def soft_values(values: Tensor, log_probs: Tensor, temperature: Tensor | float) -> Tensor:
    """Add the entropy's part to values (SAC, arXiv:1812.05905, eq. 3).

        V = Q(a) - temperature * log pi(a)

    Args:
        values: float [B], Q of actions drawn from the actor.
        log_probs: float [B], their log-densities.
        temperature: float [] or a number, >= 0; 0 leaves the values as they are.

    Returns: float [B].
    """
    require_shape("log_probs", log_probs, tuple(values.shape), "[B]")
    return values - temperature * log_probs


def move_target_parameters(
    targets: Iterable[Tensor], online: Iterable[Tensor], *, rate: float
) -> None:
    """Move the parameters of a target network towards the learnt ones, in place.

        target = (1 - rate) * target + rate * online

    Polyak averaging of DDPG, arXiv:1509.02971, algorithm 1, there tau.

    Args:
        targets: parameters of the target network, which need no gradient.
        online: parameters of the learnt network in the same order.
        rate: in (0, 1]; 1 copies.

    Raises: ValueError for a rate out of range, or if the networks differ in their parameters.
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate is {rate}, expected a number above 0 and at most 1, such as 0.005.")
    moved, learnt = list(targets), list(online)
    if [tensor.shape for tensor in moved] != [tensor.shape for tensor in learnt]:
        raise ValueError(
            f"the target network has {len(moved)} parameters, the learnt one {len(learnt)}, or "
            "their shapes differ; expected a copy of the learnt network."
        )
    with torch.no_grad():
        # a fused list operation: one head has a dozen tensors, and an update dozens of steps
        torch._foreach_lerp_(moved, learnt, rate)


def _require_gamma(gamma: float) -> None:
    if not 0.0 < gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}, expected a number above 0 and at most 1.")


def _require_lengths(num_rewards: Tensor, num_rows: int, horizon: int | None) -> None:
    require_shape("num_rewards", num_rewards, (num_rows,), "[B]")
    if num_rows == 0:
        return
    least, largest = int(num_rewards.min()), int(num_rewards.max())
    if least < 1 or (horizon is not None and largest > horizon):
        bound = "at least 1" if horizon is None else f"1 to {horizon}, the width of rewards"
        raise ValueError(f"num_rewards has {least} to {largest}, expected {bound}.")
