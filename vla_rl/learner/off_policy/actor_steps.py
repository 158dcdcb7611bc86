"""One gradient step of the actor.

rlt                    -q Q(mu) + bc (mu - base's or human's)^2, references dropped
td3_bc                 -alpha Q(mu) / mean |Q| + (mu - executed)^2
sac, cql, rlpd, dsrl   temperature log pi - Q
iql, awr               exp(advantage) (mu - executed)^2
filtered_bc, dagger    |mu - executed|, or an expert's label
"""

from dataclasses import replace

import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import (
    LossWeights,
    advantage_weights,
    cloning_targets,
    cloning_weights,
    drop_references,
    imitation_errors,
    imitation_loss,
    reduce_critics,
    soft_actor_loss,
    temperature_loss,
    value_and_cloning_loss,
    weighted_cloning_loss,
)
from vla_rl.learner.off_policy.batches import Batch
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


def train_rlt_actor(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Follow the critic, near the base's chunk or what a person did; the base's chunk is hidden at times."""
    config, step = training.config, training.num_actor_steps
    dropped = draws.uniform(len(batch)) < config.reference_dropout
    seen = replace(batch.state, reference=drop_references(batch.state.reference, dropped))
    action = act(training.actor, seen).mode
    aim = cloning_targets(batch.state.reference, batch.action, batch.intervened)
    weights = LossWeights(bc=config.bc.value_at(step), q=config.q.value_at(step))
    return _follow_critic(training, batch, action, aim, weights)


def train_td3_bc_actor(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Follow the critic, near executed actions."""
    action = act(training.actor, batch.state).mode
    return _follow_critic(training, batch, action, batch.action, None)


def _follow_critic(
    training: HeadTraining, batch: Batch, action: Tensor, aim: Tensor, weights: LossWeights | None
) -> StepMetrics:
    critics, _ = get_critics(training)
    values = reduce_critics(value_actions(critics, batch.state, action))
    if weights is None:
        weights = cloning_weights(values, alpha=training.config.alpha)
    errors = imitation_errors(action, aim)
    loss = value_and_cloning_loss(values, errors, weights)
    report = training.step("actor", loss)
    return {
        "actor/loss": loss.detach(),
        "actor/q": values.detach().mean(),
        "actor/imitation": errors.detach().mean(),
        "actor/q_weight": weights.q,
        "actor/bc_weight": weights.bc,
        "actor/grad_norm": report.grad_norm,
        "actor/distance_to_base": _distance(action, batch),
    }


def train_soft_actor(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Follow the critic with an entropy bonus, whose weight is trained towards a target entropy."""
    critics, _ = get_critics(training)
    assert training.temperature is not None
    action, log_prob = draw_actions(training, batch.state, draws)
    values = reduce_critics(value_actions(critics, batch.state, action), "mean")
    loss = soft_actor_loss(values, log_prob, training.temperature())
    report = training.step("actor", loss)
    # numbers that repeat others have no entropy of their own
    free: int = training.actor.num_free
    target = training.config.target_entropy
    training.step(
        "temperature",
        temperature_loss(
            training.temperature.log_value,
            log_prob,
            target_entropy=-0.5 * free if target is None else target,
        ),
    )
    return {
        "actor/loss": loss.detach(),
        "actor/q": values.detach().mean(),
        "actor/entropy": -log_prob.detach().mean(),
        "actor/temperature": training.temperature().detach(),
        "actor/grad_norm": report.grad_norm,
        "actor/distance_to_base": _distance(action, batch),
    }


def train_weighted_actor(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Imitate executed actions, weighted by how much better than the state's value they were."""
    config, state = training.config, batch.state
    with torch.no_grad():
        earned = batch.return_to_go
        if training.target_critics is not None:
            earned = reduce_critics(value_actions(training.target_critics, state, batch.action))
        weights = advantage_weights(
            earned - value_states(training.values, state),
            temperature=config.advantage_temperature,
            max_weight=config.max_weight,
        )
    action = act(training.actor, state).mode
    loss = weighted_cloning_loss(imitation_errors(action, batch.action), weights)
    return {**_imitate(training, batch, action, loss), "actor/weight": weights.mean()}


def train_imitating_actor(training: HeadTraining, batch: Batch, draws: Draws) -> StepMetrics:
    """Imitate executed actions, and an expert's labels where there are some (dagger alone)."""
    action = act(training.actor, batch.state).mode
    aim = batch.action
    if training.config.algorithm == "dagger":
        aim = torch.where(batch.has_expert[:, None], batch.expert_action, aim)
    loss = imitation_loss(imitation_errors(action, aim, distance="l1"))
    return _imitate(training, batch, action, loss)


def _imitate(training: HeadTraining, batch: Batch, action: Tensor, loss: Tensor) -> StepMetrics:
    report = training.step("actor", loss)
    return {
        "actor/loss": loss.detach(),
        "actor/grad_norm": report.grad_norm,
        "actor/distance_to_base": _distance(action, batch),
    }


def _distance(action: Tensor, batch: Batch) -> Tensor:
    """Return the mean |a - base's|; a base without a reference counts as 0."""
    return (action.detach() - batch.state.reference).abs().mean()
