"""The imitator of a supervised recipe: in this process, or over ranks."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane
from vla_rl.engines.language_model import LanguageModel
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.learner import ImitationConfig, Imitator
from vla_rl.learner.imitation import PolicyImitator
from vla_rl.types import Observation

if TYPE_CHECKING:
    from vla_rl.learner.imitation_passes import Preparation


@asynccontextmanager
async def opened_imitator(
    model: PolicyModel[Any] | LanguageModel[Any],
    lane: DeviceLane,
    config: ImitationConfig,
    *,
    prepare: Callable[[Sequence[Observation]], Any] | None = None,
    prepared_by: "Preparation | None" = None,
    seed: int = 0,
) -> AsyncIterator[PolicyImitator]:
    """Make an imitator; with several ranks, start their processes, and end them on leaving.

    Args:
        model: the policy.
        lane: computes with it in this process.
        config: optimizer, micro-batches and ranks.
        prepare: makes training batches in this process. None: the model itself.
        prepared_by: makes those of ranks. None: the model itself.
        seed: seed of what ranks draw.

    Raises: ConfigError if the ranks cannot share this policy on this machine.
    """
    if config.ranks == 1:
        yield Imitator(model, lane, config, prepare=prepare)
        return
    # imported here, because one process pays nothing for what several need
    from vla_rl.learner.distributed import ShardedImitator

    async with Runtime("imitation") as runtime:
        sharded = ShardedImitator(model, runtime, lane, config, prepared_by=prepared_by, seed=seed)
        async with sharded as imitator:
            print(f"{config.ranks} ranks share the updates", flush=True)
            yield imitator
