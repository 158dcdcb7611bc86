"""Gradient steps by the name of the algorithm: the critics', and the actor's if it is due.

A step is one job of the device lane. Its random numbers come from its own seed, drawn on the host, so that
they are the same on every device and after a resume.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from vla_rl.learner.off_policy.actor_steps import (
    train_imitating_actor,
    train_rlt_actor,
    train_soft_actor,
    train_td3_bc_actor,
    train_weighted_actor,
)
from vla_rl.learner.off_policy.batches import Batch, StepRows
from vla_rl.learner.off_policy.critic_steps import (
    train_conservative_critics,
    train_expectile_critics,
    train_return_values,
    train_soft_critics,
    train_td3_critics,
)
from vla_rl.learner.off_policy.training import Draws, HeadTraining, StepMetrics

Step: TypeAlias = Callable[[HeadTraining, Batch, Draws], StepMetrics]


class Steps(NamedTuple):
    """The two halves of an algorithm's gradient step."""

    critics: Step | None
    actor: Step


STEPS: Final[Mapping[str, Steps]] = MappingProxyType(
    {
        "rlt": Steps(train_td3_critics, train_rlt_actor),
        "td3_bc": Steps(train_td3_critics, train_td3_bc_actor),
        "sac": Steps(train_soft_critics, train_soft_actor),
        "rlpd": Steps(train_soft_critics, train_soft_actor),
        "dsrl": Steps(train_soft_critics, train_soft_actor),
        "cql": Steps(train_conservative_critics, train_soft_actor),
        "iql": Steps(train_expectile_critics, train_weighted_actor),
        "awr": Steps(train_return_values, train_weighted_actor),
        "filtered_bc": Steps(None, train_imitating_actor),
        "dagger": Steps(None, train_imitating_actor),
    }
)
"""Gradient steps by the name of the algorithm."""


def take_step(training: HeadTraining, rows: StepRows, seed: int) -> StepMetrics:
    """Take one gradient step; on the device lane.

    Args:
        training: networks and optimizers.
        rows: rows of the critic and of the actor.
        seed: seed of what the step draws.

    Returns: metrics by path. Raises: DivergedError for repeated gradients that are not finite.
    """
    config, draws = training.config, Draws(seed, training.device)
    steps = STEPS[config.algorithm]
    metrics: StepMetrics = {}
    number = training.num_steps
    training.num_steps += 1
    is_due = rows.actor is not None
    if steps.critics is not None:
        metrics |= steps.critics(training, rows.critic, draws)
        is_due &= number >= config.critic_first_steps and number % config.actor_interval == 0
    if is_due and rows.actor is not None:
        metrics |= steps.actor(training, rows.actor, draws)
        training.num_actor_steps += 1
    training.follow()
    return metrics
