"""Supervised learning over several ranks: demonstrations are dealt to them as rows are."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from vla_rl.actors import Runtime
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import LanguageModel, PolicyModel
from vla_rl.learner.checkpoint.state import TrainingState
from vla_rl.learner.config import ImitationConfig, LearnerConfig
from vla_rl.learner.distributed.backend import ShardedBackend
from vla_rl.learner.estimates.rank_memory import require_layout
from vla_rl.learner.imitation import PolicyImitator
from vla_rl.learner.imitation_backend import ImitationBackend, Preparation
from vla_rl.learner.optimizer import StepReport


class ShardedImitator(PolicyImitator):
    """A `PolicyImitator` over `config.ranks` processes; `async with` starts and ends them.

    The weights of `model` follow when they are asked for (`fetch`), and not in each update.

    Args:
        model: the policy, saved for the ranks when they start.
        runtime: starts the ranks.
        lane: replaces the weights of `model`, and evaluates.
        config: optimizer, micro-batches and ranks.
        prepared_by: makes the ranks' training batches, for example with augmentation. None: the
            model itself.
        seed: seed of what ranks draw, such as augmentation and the noise of a diffusion head.

    Raises: ConfigError if the ranks cannot share this policy on this machine.
    """

    def __init__(
        self,
        model: PolicyModel[Any] | LanguageModel[Any],
        runtime: Runtime,
        lane: DeviceLane,
        config: ImitationConfig,
        *,
        prepared_by: Preparation | None = None,
        seed: int = 0,
    ) -> None:
        # ranks know one configuration; the fields of policy losses are not read by supervised
        # learning
        learner = LearnerConfig(
            optimizer=config.optimizer,
            micro_batch=config.micro_batch,
            ranks=config.ranks,
            shard=config.shard,
            offload=config.offload,
        )
        require_layout(model, learner)
        self._ranks = ShardedBackend(model, runtime, lane, learner, (), 0)
        if prepared_by is not None:
            self._ranks.group.set_preparation(prepared_by)
        super().__init__(ShardedImitationBackend(self._ranks, config, seed), model, lane, config)

    async def __aenter__(self) -> Self:
        await self._ranks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._ranks.__aexit__(kind, error, traceback)

    @property
    def ranks(self) -> ShardedBackend:
        """The ranks."""
        return self._ranks


class ShardedImitationBackend(ImitationBackend):
    """`ImitationBackend` over ranks.

    Args:
        ranks: the ranks.
        config: micro-batches.
        seed: seed of what ranks draw.
    """

    def __init__(self, ranks: ShardedBackend, config: ImitationConfig, seed: int) -> None:
        super().__init__(ranks.group, config, seed)
        self._sharded = ranks

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._sharded.weight_version

    async def optim_step(self) -> StepReport:
        """Take one optimizer step on every rank."""
        report = await self._sharded.optim_step(publish=False)
        # nothing acts with the weights while they are trained, so that they stay with the ranks
        await self._sharded.publish_unchanged()
        return report

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses, in float64, in which those of several ranks are added up."""
        return float(torch.stack(list(losses)).double().sum())

    async def fetch_weights(self) -> None:
        """Replace the model's weights by those of the ranks."""
        await self._sharded.fetch_weights()

    async def snapshot(self) -> TrainingState:
        """Copy the state on every rank; its files are written from there."""
        return await self._sharded.snapshot()

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot."""
        await self._sharded.restore(state)
