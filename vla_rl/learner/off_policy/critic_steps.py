"""One gradient step of the critics, and of values of states.

rlt, td3_bc            R + gamma^n min Q'(next, target actor + noise)
sac, rlpd, dsrl        R + gamma^n min Q'(next, drawn action)
cql                    the same, and a penalty on values of drawn actions
iql                    R + gamma^n V(next), V an expectile of Q'
awr                    V fitted to returns
"""

import math

import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import (
    conservative_gaps,
    expectile_loss,
    noisy_target_actions,
    reduce_critics,
    soft_values,
    td_loss,
    td_targets,
)
from vla_rl.learner.off_policy.batches import Batch, State
from vla_rl.learner.off_policy.critics import ActionCritics
from vla_rl.learner.off_policy.training import (
    Draws,
    HeadTraining,
    StepMetrics,
    act,
    draw_actions,
    get_critics,
    value_actions,
    value_states,
)


def train_td3_critics(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Train on the target actor's next action, smoothed by noise."""
    critics, target_critics = get_critics(training)
    config = training.config
    with torch.no_grad():
        action = act(training.target_actor, batch.next_state).mode
        limit = training.target_actor.limit
        action = noisy_target_actions(
            action,
            draws.normal(*action.shape),
            scale=config.target_noise,
            noise_bound=config.target_noise_clip,
            # a residual head's actions are bounded by its scale around the base's chunk
            action_bound=math.inf if limit is None else limit,
        )
        next_values = _reduce_next(training, target_critics, batch, action, draws)
        targets = _targets(training, batch, next_values)
    values = value_actions(critics, batch.state, batch.action)
    return _fit_critics(training, values, targets, td_loss(values, targets))


def train_soft_critics(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Train on a drawn next action; with `entropy_in_targets` its entropy counts too."""
    critics, target_critics = get_critics(training)
    with torch.no_grad():
        targets = _soft_targets(training, target_critics, batch, draws)
    values = value_actions(critics, batch.state, batch.action)
    return _fit_critics(training, values, targets, td_loss(values, targets))


def _soft_targets(
    training: HeadTraining, target_critics: ActionCritics, batch: Batch, draws: Draws
) -> Tensor:
    action, log_prob = draw_actions(training, batch.next_state, draws)
    next_values = _reduce_next(training, target_critics, batch, action, draws)
    if training.config.entropy_in_targets:
        assert training.temperature is not None
        next_values = soft_values(next_values, log_prob, training.temperature())
    return _targets(training, batch, next_values)


def train_conservative_critics(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Train as SAC does, and lower the values of drawn actions below those of executed ones (CQL)."""
    critics, target_critics = get_critics(training)
    config = training.config
    with torch.no_grad():
        targets = _soft_targets(training, target_critics, batch, draws)
        actions, densities = _other_actions(training, batch, draws)
    values = value_actions(critics, batch.state, batch.action)
    num_others = len(actions)
    state = State(
        *(
            each.repeat(num_others, 1)
            for each in (batch.state.features, batch.state.proprio, batch.state.reference)
        )
    )
    drawn = value_actions(critics, state, actions.flatten(0, 1))
    drawn = drawn.reshape(len(values), num_others, len(batch))
    gap = conservative_gaps(drawn.transpose(1, 2), densities.T, values).mean()
    metrics = _fit_critics(
        training, values, targets, td_loss(values, targets) + config.cql_weight * gap
    )
    return {**metrics, "critic/conservative_gap": gap.detach()}


def _other_actions(training: HeadTraining, batch: Batch, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return actions [S, N, A] that the buffer need not have, and their log-densities [S, N]."""
    size = batch.action.shape
    limit = 1.0 if training.actor.limit is None else training.actor.limit
    actions, densities = [], []
    for _ in range(training.config.cql_actions):
        actions.append((2.0 * draws.uniform(*size) - 1.0) * limit)
        densities.append(
            torch.full((size[0],), -size[1] * math.log(2.0 * limit), device=batch.action.device)
        )
        for state in (batch.state, batch.next_state):
            action, log_prob = draw_actions(training, state, draws)
            actions.append(action)
            densities.append(log_prob)
    return torch.stack(actions), torch.stack(densities)


def train_expectile_critics(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Train values on an expectile of stored actions' values, and critics on those values (IQL)."""
    critics, target_critics = get_critics(training)
    assert training.values is not None
    state, following = batch.state, batch.next_state
    with torch.no_grad():
        stored = reduce_critics(value_actions(target_critics, state, batch.action))
        next_values = training.values(following.features, following.proprio)
        targets = _targets(training, batch, next_values)
    fitted = training.values(state.features, state.proprio)
    value_loss = expectile_loss(fitted, stored, expectile=training.config.expectile)
    training.step("values", value_loss)
    values = value_actions(critics, state, batch.action)
    metrics = _fit_critics(training, values, targets, td_loss(values, targets))
    return {**metrics, "critic/value_loss": value_loss.detach()}


def train_return_values(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Train values on what followed, undiscounted (AWR)."""
    values = value_states(training.values, batch.state)
    loss = td_loss(values[None], batch.return_to_go)
    report = training.step("values", loss)
    return {
        "critic/loss": loss.detach(),
        "critic/q_mean": values.detach().mean(),
        "critic/q_max": values.detach().max(),
        "critic/target_mean": batch.return_to_go.mean(),
        "critic/grad_norm": report.grad_norm,
    }


def _targets(training: HeadTraining, batch: Batch, next_values: Tensor) -> Tensor:
    return td_targets(
        batch.reward,
        batch.discount,
        batch.terminated,
        next_values,
        value_range=training.config.return_range,
    )


def _reduce_next(
    training: HeadTraining,
    target_critics: ActionCritics,
    batch: Batch,
    action: Tensor,
    draws: Draws,
) -> Tensor:
    """Return the least of some target critics' values of the next action, [N]."""
    config = training.config
    members = draws.members(config.num_critics, config.target_critics)
    return reduce_critics(value_actions(target_critics, batch.next_state, action), members=members)


def _fit_critics(
    training: HeadTraining, values: Tensor, targets: Tensor, loss: Tensor
) -> StepMetrics:
    report = training.step("critics", loss)
    found = values.detach()
    return {
        "critic/loss": loss.detach(),
        "critic/q_mean": found.mean(),
        "critic/q_max": found.max(),
        "critic/target_mean": targets.mean(),
        "critic/grad_norm": report.grad_norm,
    }
