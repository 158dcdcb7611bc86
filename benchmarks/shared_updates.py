"""Learners in one process and over several ranks, on the same rows, and how far apart they are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from vla_rl.learner import (
    LearnerConfig,
    OptimizerConfig,
    PolicyLearner,
    TeamState,
    TrainingState,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.types import Trajectory

TRAINING = LearnerConfig(
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0, max_grad_norm=1e9), micro_batch=2
)
"""One step moves by 1e-3, and its gradient is not clipped, so that the moments show it."""


def settings(**changes: Any) -> LearnerConfig:
    """The settings above with others."""
    return msgspec.structs.replace(TRAINING, **changes)


async def saved(learner: PolicyLearner, folder: Path) -> TrainingState:
    """The learner's state, written to a checkpoint and read again."""
    state = TeamState.of_one(await learner.snapshot())
    path = await save_checkpoint(folder, state, {})
    return (await load_checkpoint(path)).state.only


async def gradients(
    learner: PolicyLearner,
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float],
    folder: Path,
) -> dict[str, Tensor]:
    """The gradient of the first update of a learner, by parameter."""
    await learner.update(trajectories, list(advantages))
    state = await saved(learner, folder)
    assert isinstance(state.optimizer, Mapping)
    return {
        name.removeprefix("exp_avg/"): moment / (1.0 - TRAINING.optimizer.betas[0])
        for name, moment in state.optimizer.items()
        if name.startswith("exp_avg/")
    }


def relative_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of a parameter over its largest number.

    A parameter below 1e-4 of the global norm is compared with that norm.
    """
    assert found.keys() == expected.keys()
    norm = float(torch.stack([each.norm() for each in expected.values()]).norm())
    worst = 0.0
    for name, numbers in expected.items():
        largest = float(numbers.abs().max())
        scale = largest if largest >= 1e-4 * norm else norm
        worst = max(worst, float((found[name] - numbers).abs().max()) / scale)
    return worst
