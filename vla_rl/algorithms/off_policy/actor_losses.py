"""Losses of actors that learn from stored transitions and a critic, or from stored actions alone.

B rows of actions with A numbers each: the C * D numbers of a chunk, or a head's own. Means are over
A as over B, so that a weight means the same for a chunk of any length.
"""

from typing import Literal, NamedTuple

from vla_rl.algorithms.tensors import Tensor, full_precision, require_shape, torch


class LossWeights(NamedTuple):
    """Weights of an actor's two terms.

    Attributes:
        bc: weight of behaviour cloning (w_bc).
        q: weight of the critic's value (w_q).
    """

    bc: float
    q: float


def ramp_weights(
    update: int, *, first: LossWeights, last: LossWeights, warmup_updates: int, ramp_updates: int
) -> LossWeights:
    """Interpolate the weights of an actor's loss from `first` to `last`.

        share = clamp((update - warmup_updates + 1) / ramp_updates, 0, 1)
        weights = first + share * (last - first)

    RLT on ManiSkill (RLinf's settings): (7, 0.05) for 20,000 updates, then over 50,000 to
    (2.8, 0.5). A critic that has seen little says nothing of use.

    Args:
        update: gradient steps done before, from 0.
        first: weights of the first `warmup_updates`.
        last: weights after `warmup_updates` + `ramp_updates`.
        warmup_updates: >= 0.
        ramp_updates: >= 0; 0 changes at once.

    Returns: the weights of this gradient step.
    """
    done = update - warmup_updates + 1
    if done <= 0:
        return first
    share = 1.0 if ramp_updates <= 0 else min(done / ramp_updates, 1.0)
    return LossWeights(*(a + share * (b - a) for a, b in zip(first, last, strict=True)))


def cloning_targets(reference: Tensor, executed: Tensor, intervened: Tensor) -> Tensor:
    """Choose what behaviour cloning aims at: the frozen policy's chunk, or an expert's numbers.

    RLT, arXiv:2604.23073: where a person or expert acted, what they did.

    Args:
        reference: float [B, A], of the frozen policy.
        executed: float [B, A], in the same units.
        intervened: bool [B, A] or [B, C] with A a multiple of C (one flag a control step).

    Returns: float [B, A], a constant. Raises: ValueError for shapes that do not fit.
    """
    num_rows, width = reference.shape
    require_shape("executed", executed, (num_rows, width), "[B, A]")
    require_shape("intervened", intervened, (num_rows, None), "[B, C]")
    horizon = intervened.shape[1]
    if horizon == 0 or width % horizon:
        raise ValueError(
            f"intervened has {horizon} flags a row, expected a divisor of the {width} numbers of "
            "an action: one flag for each control step of a chunk."
        )
    flags = intervened.repeat_interleave(width // horizon, dim=1)
    return torch.where(flags, executed, reference).detach()


def drop_references(reference: Tensor, dropped: Tensor) -> Tensor:
    """Replace the reference by zeros in rows whose actor may not copy it.

    RLT, arXiv:2604.23073, with probability 0.5 in the actor's update: otherwise the actor learns to
    pass its input on.

    Args:
        reference: float [B, A].
        dropped: bool [B], drawn by the caller.

    Returns: float [B, A].
    """
    require_shape("dropped", dropped, (reference.shape[0],), "[B]")
    return torch.where(dropped[:, None], torch.zeros_like(reference), reference)


def imitation_errors(
    actions: Tensor, targets: Tensor, *, distance: Literal["l1", "mse"] = "mse"
) -> Tensor:
    """Compare each action with its target, as a mean over the A numbers of the row.

    Args:
        actions: float [B, A], with a gradient.
        targets: float [B, A], constants.
        distance: "l1", the absolute difference, as OpenVLA-OFT's head (arXiv:2502.19645), or "mse",
            its square.

    Returns: float [B]. Raises: ValueError for an unknown distance or shapes that differ.
    """
    require_shape("actions", actions, (None, None), "[B, A]")
    require_shape("targets", targets, tuple(actions.shape), "[B, A]")
    difference = full_precision(actions) - full_precision(targets).detach()
    if distance == "mse":
        return difference.square().mean(dim=1)
    if distance == "l1":
        return difference.abs().mean(dim=1)
    raise ValueError(f'distance is {distance!r}, expected "l1" or "mse".')


def imitation_loss(errors: Tensor, weights: Tensor | None = None) -> Tensor:
    """Average what imitation costs over the rows that count.

        L = sum_b w_b error_b / sum_b w_b

    DAgger (arXiv:1011.0686): the errors to the expert's actions, w = 1 where a row has a label.
    Filtered behaviour cloning: w = 1 in successful episodes.

    Args:
        errors: float [B], of `imitation_errors` or negated log-probs; the only input with a
            gradient.
        weights: bool or float [B], >= 0; errors of weight 0 are not read. None: all rows count.

    Returns: float []. Raises: ValueError if no row counts.
    """
    require_shape("errors", errors, (None,), "[B]")
    if weights is None:
        weights = torch.ones_like(errors, dtype=torch.bool)
    require_shape("weights", weights, tuple(errors.shape), "[B]")
    counted = weights.to(errors.dtype).detach()
    total = counted.sum()
    if not bool(total > 0):
        raise ValueError(
            "no row of the batch counts for imitation (all weights are 0); expected at least one "
            "labelled or successful row; skip the step instead."
        )
    return (torch.where(counted > 0, errors, 0.0) * counted).sum() / total


def advantage_weights(advantages: Tensor, *, temperature: float, max_weight: float) -> Tensor:
    """Weigh stored actions by how much better than expected they were.

        w = min(exp(A / temperature), max_weight)

    AWR, Peng et al. 2019, arXiv:1910.00177, with its clip of 20; IQL, arXiv:2110.06169,
    eq. 7, with A = Q(s, a) - V(s) and a clip of 100. IQL and d3rlpy write beta = 1 / temperature.

    Args:
        advantages: float [B].
        temperature: > 0; the smaller, the more only the best actions count.
        max_weight: largest weight, > 0.

    Returns: float [B], constants. Raises: ValueError for a number out of range.
    """
    if not (temperature > 0.0 and max_weight > 0.0):
        raise ValueError(
            f"temperature is {temperature}, max_weight {max_weight}; expected numbers above 0."
        )
    require_shape("advantages", advantages, (None,), "[B]")
    return (full_precision(advantages).detach() / temperature).exp().clamp(max=max_weight)


def weighted_cloning_loss(costs: Tensor, weights: Tensor) -> Tensor:
    """Average costs of stored actions times their weights (AWR, IQL).

        L = mean_b w_b cost_b,    cost = -log pi(a_b | s_b)  or the squared error of a deterministic actor

    The mean is over all rows: `imitation_loss` divides by the weights' sum instead.

    Args:
        costs: float [B], the only input with a gradient.
        weights: float [B], of `advantage_weights`.

    Returns: float []. Raises: ValueError for shapes that differ or no row.
    """
    require_shape("costs", costs, (None,), "[B]")
    require_shape("weights", weights, tuple(costs.shape), "[B]")
    _require_rows(costs.shape[0])
    return (full_precision(costs) * weights.detach()).mean()


def value_and_cloning_loss(values: Tensor, errors: Tensor, weights: LossWeights) -> Tensor:
    """Raise the critic's value while staying near what the frozen policy would do.

        L = -w_q mean_b Q(s_b, mu(s_b)) + w_bc mean_b error_b

    RLT, arXiv:2604.23073. With `cloning_weights`, TD3+BC's.

    Args:
        values: float [B], of `reduce_critics` at the actor's actions.
        errors: float [B], `imitation_errors(mu, cloning_targets(...))`.
        weights: of `ramp_weights` or `cloning_weights`.

    Returns: float []. Raises: ValueError for shapes that differ or no row.
    """
    require_shape("values", values, (None,), "[B]")
    require_shape("errors", errors, tuple(values.shape), "[B]")
    _require_rows(values.shape[0])
    return -weights.q * full_precision(values).mean() + weights.bc * errors.mean()


def cloning_weights(values: Tensor, *, alpha: float) -> LossWeights:
    """Scale the critic's term by its own size, so that the other weight is of no unit.

        w_q = alpha / mean_b |Q(s_b, mu(s_b))|,    w_bc = 1

    TD3+BC, Fujimoto and Gu 2021, arXiv:2106.06860, eq. 5.

    Args:
        values: float [B], at the actor's actions; no gradient passes.
        alpha: > 0; 2.5 in the paper.

    Returns: weights for `value_and_cloning_loss`. Raises: ValueError without a row.
    """
    _require_rows(values.shape[0])
    # a critic that says 0 everywhere has no gradient either; without a bound the weight is infinite
    size = float(full_precision(values).detach().abs().mean().clamp(min=1e-8))
    return LossWeights(bc=1.0, q=alpha / size)


def _require_rows(num_rows: int) -> None:
    if num_rows < 1:
        raise ValueError("the batch has no row; expected at least one; skip the step instead.")
