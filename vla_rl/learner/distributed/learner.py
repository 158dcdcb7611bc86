"""A learner whose passes are computed by several ranks."""

from collections.abc import Collection, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from vla_rl.actors import Runtime
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.learner.config import CriticConfig, LearnerConfig
from vla_rl.learner.critic import PolicyCritic
from vla_rl.learner.distributed.critic import RankCriticPasses
from vla_rl.learner.distributed.rank_metrics import rank_metrics, rank_slices, ranks_in_words
from vla_rl.learner.distributed.ranks import RankPasses
from vla_rl.learner.distributed.seats import Seating
from vla_rl.learner.learner import PolicyLearner, UpdateReport
from vla_rl.learner.rank_memory import require_layout
from vla_rl.learner.rows import Advantage
from vla_rl.learner.scoring import PolicyReference
from vla_rl.learner.training import WeightSink
from vla_rl.types import Trajectory


class ShardedLearner(PolicyLearner):
    """A `PolicyLearner` over `config.ranks` processes; `async with` starts and ends them.

    An engine may share `model` also in updates of several optimizer steps: its weights are replaced
    once, at the end of an update.

    Args:
        model: the policy, saved for the ranks when they start. Its weights are replaced by theirs
            after every update.
        runtime: starts the ranks.
        lane: replaces the weights, and is shared with the engines.
        config: loss, batches, optimizer and ranks.
        publish_to: engines that get the new weights with every update.
        weight_version: number of updates already applied to the weights of `model`.
        member: name of the policy in a team of several; "" in a team of one.
        other_bytes: bytes that ranks of other policies hold on each GPU.
        lost_gpus: numbers of the GPUs that no rank may use.
        are_elsewhere: whether `sit` will name the hosts and GPUs of the ranks.

    Raises: ConfigError if the ranks cannot share this policy on this machine.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        runtime: Runtime,
        lane: DeviceLane,
        config: LearnerConfig,
        publish_to: Sequence[WeightSink] = (),
        *,
        weight_version: int = 0,
        member: str = "",
        other_bytes: int = 0,
        lost_gpus: Collection[int] = (),
        are_elsewhere: bool = False,
    ) -> None:
        self._model, self._has_reference = model, False
        self._require_layout = partial(
            require_layout,
            model,
            config,
            other_bytes=other_bytes,
            lost_gpus=lost_gpus,
            are_elsewhere=are_elsewhere,
        )
        self._critic_config: CriticConfig | None = None
        self._peak_flops: float | None = None
        self._require_layout()
        self._ranks = RankPasses(
            model, runtime, lane, config, publish_to, weight_version, member, lost_gpus
        )
        super().__init__(self._ranks, lane, config, name=type(model).__name__)

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

    def sit(self, seating: Seating) -> None:
        """Start the ranks on these hosts and GPUs. Call it before `async with`.

        Raises: ConfigError if a GPU has too little memory.
        """
        gpu_bytes = [(seat.gpu_in_words, seat.gpu_bytes) for seat in seating.seats]
        self._require_layout(
            has_reference=self._has_reference,
            critic=self._critic_config,
            seats=[(name, size) for name, size in gpu_bytes if size is not None],
        )
        self._ranks.group.sit(seating)

    def count_flops(self, peak_flops: float) -> None:
        """Measure each rank's MFU, given its device's operations per second.

        Call it before `async with`.
        """
        self._ranks.group.count_flops()
        self._peak_flops = peak_flops

    async def update(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Sequence[Advantage],
        reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
    ) -> UpdateReport:
        """Update the policy as `PolicyLearner.update`, and report what each rank did.

        The metrics are of the update, the timelines of everything since the last one.
        """
        before = await self._ranks.times()  # of the critic and the reference
        report = await super().update(trajectories, advantages, reference_log_probs)
        times = await self._ranks.times()
        measured = rank_metrics(times, report.metrics["update/seconds"], self._peak_flops)
        return UpdateReport(
            report.weight_version,
            report.metrics | measured,
            rank_slices(before, times),
            ranks_in_words(measured),
        )

    def critic(self, config: CriticConfig, seed: int) -> PolicyCritic:
        """Return a critic that the ranks compute. Call it before `async with`.

        Args: those of `Critic`.
        """
        self._critic_config = config
        self._require_layout(has_reference=self._has_reference, critic=config)
        self._ranks.group.hold_critic(config, seed)
        passes = RankCriticPasses(self._ranks.group, self._config, config)
        return PolicyCritic(passes, config, seed)

    def reference(self) -> PolicyReference:
        """Return the policy as it is when the ranks start, which they score with.

        Call it before `async with`.
        """
        self._has_reference = True
        self._require_layout(has_reference=True, critic=self._critic_config)
        self._ranks.group.hold_reference()
        return PolicyReference(self._ranks.reference_log_probs)

    @property
    def ranks(self) -> RankPasses:
        """The ranks."""
        return self._ranks
