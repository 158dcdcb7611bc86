"""Losses of critics on stored transitions: TD error, CQL's penalty, IQL's expectile.

B rows, E critics, S sampled actions a row. Values carry the critics first, [E, B].
"""

from vla_rl.algorithms.tensors import Tensor, full_precision, require_shape, torch


def td_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Compute the squared TD error, a mean over critics and rows.

        L = mean_{e,b} (Q_e(s_b, a_b) - y_b)^2

    DDPG, arXiv:1509.02971, and TD3, arXiv:1802.09477; RLT's has the same mean. Others add up the
    critics: stable-baselines3's TD3 is E times this, its SAC E / 2 times, d3rlpy's E times.

    Args:
        values: float [E, B], of the stored actions; the only input with a gradient.
        targets: float [B], of `td_targets`.

    Returns: float []. Raises: ValueError for shapes that differ or no row.
    """
    require_shape("values", values, (None, None), "[E, B]")
    require_shape("targets", targets, (values.shape[1],), "[B]")
    _require_rows(values.shape[1])
    return (full_precision(values) - full_precision(targets).detach()).square().mean()


def conservative_gaps(sampled_values: Tensor, log_densities: Tensor, data_values: Tensor) -> Tensor:
    """Measure how much higher a critic values other actions than the stored ones.

        gap_e = mean_b [log sum_s exp(Q_e(s_b, a_bs) - log mu(a_bs)) - Q_e(s_b, a_b)]

    CQL(H), Kumar et al. 2020, arXiv:2006.04779, eq. 4, with its appendix F's importance sampling:
    samples are uniform ones and the actor's at this observation and at the next. The constant
    log S is left out, as in the authors' code. The critic's loss is `td_loss` + weight * the mean
    of the gaps over critics (d3rlpy adds critics up: E times each).

    Args:
        sampled_values: float [E, B, S].
        log_densities: float [B, S], log mu of each sample under what drew it: the actor's log-prob,
            or -A log(high - low) for uniform ones of A numbers. No gradient passes.
        data_values: float [E, B], of the stored actions.

    Returns: float [E]. Raises: ValueError for shapes that differ or no row.
    """
    require_shape("sampled_values", sampled_values, (None, None, None), "[E, B, S]")
    num_critics, num_rows, num_samples = sampled_values.shape
    require_shape("log_densities", log_densities, (num_rows, num_samples), "[B, S]")
    require_shape("data_values", data_values, (num_critics, num_rows), "[E, B]")
    _require_rows(num_rows)
    weighted = full_precision(sampled_values) - full_precision(log_densities).detach()
    return (torch.logsumexp(weighted, dim=2) - full_precision(data_values)).mean(dim=1)


def conservative_multiplier_loss(
    log_multiplier: Tensor, gaps: Tensor, *, threshold: float
) -> Tensor:
    """Compute the loss of the weight that holds CQL's gap near a threshold.

        L = -exp(log_multiplier) * mean_e (gap_e - threshold)

    CQL, arXiv:2006.04779, appendix F: the weight grows while the gap is above the threshold. d3rlpy
    adds critics up.

    Args:
        log_multiplier: float [], the only input with a gradient.
        gaps: float [E], of `conservative_gaps`.
        threshold: the gap that is allowed; 10 in the authors' code.

    Returns: float [].
    """
    require_shape("log_multiplier", log_multiplier, (), "[]")
    require_shape("gaps", gaps, (None,), "[E]")
    return -log_multiplier.exp() * (gaps.detach() - threshold).mean()


def expectile_loss(values: Tensor, action_values: Tensor, *, expectile: float) -> Tensor:
    """Fit a state value to an upper expectile of its action values.

        u = Q(s, a) - V(s),    L = mean_b |expectile - 1(u < 0)| u^2

    IQL, Kostrikov et al. 2021, arXiv:2110.06169, eq. 5: at 0.5 the mean, towards 1 the best stored
    action. The critic's target is then R + gamma^n V(next).

    Args:
        values: float [B], V; the only input with a gradient.
        action_values: float [B], of the target critics at the stored actions, reduced.
        expectile: in (0, 1); 0.7 in the paper, 0.9 for mazes.

    Returns: float []. Raises: ValueError for shapes that differ, no row, or an expectile out of
    range.
    """
    if not 0.0 < expectile < 1.0:
        raise ValueError(f"expectile is {expectile}, expected a number between 0 and 1.")
    require_shape("values", values, (None,), "[B]")
    require_shape("action_values", action_values, tuple(values.shape), "[B]")
    _require_rows(values.shape[0])
    error = full_precision(action_values).detach() - full_precision(values)
    weight = torch.where(error < 0.0, 1.0 - expectile, expectile)
    return (weight * error.square()).mean()


def _require_rows(num_rows: int) -> None:
    # the mean of no rows is NaN, which Adam would carry into every weight
    if num_rows < 1:
        raise ValueError("the batch has no row; expected at least one; skip the step instead.")
