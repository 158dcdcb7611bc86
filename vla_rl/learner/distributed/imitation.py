"""Supervised learning over several ranks: demonstrations are dealt to them as rows are."""

import asyncio
from collections.abc import Awaitable, Sequence
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
from vla_rl.learner.distributed.messages import idle_row, in_order, name_cached_arrays
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.estimates.rank_memory import require_layout
from vla_rl.learner.imitation import PolicyImitator
from vla_rl.learner.imitation_backend import Preparation, SftRows
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.plan import plan_passes
from vla_rl.types import derive_seed
from vla_rl.util.tasks import await_end


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


class ShardedImitationBackend:
    """`ImitationBackend` over ranks.

    Args:
        ranks: the ranks.
        config: micro-batches, and what each rank holds.
        seed: seed of what ranks draw.
    """

    def __init__(self, ranks: ShardedBackend, config: ImitationConfig, seed: int) -> None:
        self._ranks, self._config, self._seed = ranks, config, seed

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._ranks.weight_version

    async def forward_backward(self, rows: SftRows) -> list[Tensor]:
        """Compute the gradient on all ranks."""
        return await await_end(asyncio.ensure_future(self._forward_backward(rows)))

    async def optim_step(self) -> StepReport:
        """Take one optimizer step on every rank."""
        report = await self._ranks.optim_step(publish=False)
        # nothing acts with the weights while they are trained, so that they stay with the ranks
        await self._ranks.publish_unchanged()
        return report

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses."""
        return float(torch.stack(list(losses)).sum())

    async def fetch_weights(self) -> None:
        """Replace the model's weights by those of the ranks."""
        await self._ranks.fetch_weights()

    async def snapshot(self) -> TrainingState:
        """Copy the state on every rank; its files are written from there."""
        return await self._ranks.snapshot()

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot."""
        await self._ranks.restore(state)

    async def _forward_backward(self, rows: SftRows) -> list[Tensor]:
        dealt = plan_passes(
            rows.num_input_tokens, self._config.micro_batch_size, self._config.ranks
        )
        # with sharded weights each pass is a collective of all ranks
        least = max(map(len, dealt)) if self._config.shard == "weights" else 1
        num_tokens, idle = int(rows.mask.sum()), idle_row(rows.num_input_tokens)

        async def train(rank: LearnerRank, parts: Sequence[Tensor]) -> list[Tensor]:
            await rank.gather_weights(True)
            num_passes = max(len(parts), least)

            def call(number: int) -> Awaitable[Tensor]:
                is_idle = number >= len(parts)
                index = idle if is_idle else parts[number]
                part = rows.rows(index)
                if is_idle:  # a masked row adds exact zeros to every gradient
                    part = part._replace(mask=torch.zeros_like(part.mask))
                # the word is part of the seed: another one would draw other noise for the same run
                seed = derive_seed(self._seed, "lesson", self.weight_version, int(index[0]))
                observations = tuple(name_cached_arrays(each) for each in part.observations)
                part = part._replace(observations=observations)
                return rank.imitate(part, seed, num_tokens, number == num_passes - 1)

            found = await in_order(call, range(num_passes))
            # in float64, in which those of several ranks are added up
            return [loss.double() for loss in found]

        group = self._ranks.group
        losses = await group.together(train(*pair) for pair in zip(group.ranks, dealt, strict=True))
        return [loss for of_rank in losses for loss in of_rank]
