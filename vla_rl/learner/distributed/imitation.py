"""Supervised learning over several ranks: demonstrations are dealt to them as rows are."""

from types import TracebackType
from typing import Any, Self

from vla_rl.actors import Runtime
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import LanguageModel, PolicyModel
from vla_rl.learner.config import ImitationConfig, LearnerConfig
from vla_rl.learner.distributed.weights import ShardedWeights
from vla_rl.learner.estimates.rank_memory import require_layout
from vla_rl.learner.imitation import PolicyImitator
from vla_rl.learner.imitation_backend import Preparation


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
        self._sharded = ShardedWeights(model, runtime, lane, learner, (), 0, stay_with_ranks=True)
        if prepared_by is not None:
            self._sharded.group.set_preparation(prepared_by)
        super().__init__(self._sharded.group, self._sharded, model, lane, config, seed)

    async def __aenter__(self) -> Self:
        await self._sharded.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._sharded.__aexit__(kind, error, traceback)

    @property
    def ranks(self) -> ShardedWeights:
        """The ranks."""
        return self._sharded
