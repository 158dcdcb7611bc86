"""Learners whose passes are computed by several ranks.

The ranks that train a policy fit its critic too. Demonstrations are dealt to them as rows are.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.actors import Runtime
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import LanguageModel, PolicyModel, TokenModel
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.config import CriticConfig, ImitationConfig, LearnerConfig
from vla_rl.learner.critic import PolicyCritic
from vla_rl.learner.critic_backend import ValueSums, summed_values
from vla_rl.learner.distributed.group import RankGroup
from vla_rl.learner.distributed.rank_hosts import RankAssignments
from vla_rl.learner.distributed.rank_times import describe_ranks, rank_metrics, rank_slices
from vla_rl.learner.distributed.weights import RankTensors, ShardedWeights
from vla_rl.learner.estimates.rank_memory import require_layout
from vla_rl.learner.imitation import PolicyImitator
from vla_rl.learner.imitation_backend import Preparation
from vla_rl.learner.learner import PolicyLearner, UpdateReport
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.rows import Advantage
from vla_rl.learner.scoring import PolicyReference
from vla_rl.types import Trajectory
from vla_rl.util.tasks import await_end


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
        are_assigned: whether `assign_ranks` will name the hosts and GPUs of the ranks.

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
        are_assigned: bool = False,
    ) -> None:
        self._model, self._has_reference = model, False
        self._require_layout = partial(
            require_layout,
            model,
            config,
            other_bytes=other_bytes,
            lost_gpus=lost_gpus,
            are_assigned=are_assigned,
        )
        self._critic_config: CriticConfig | None = None
        self._peak_flops: float | None = None
        self._require_layout()
        self._sharded = ShardedWeights(
            model, runtime, lane, config, publish_to, weight_version, member, lost_gpus
        )
        super().__init__(self._sharded.group, self._sharded, lane, config, model)

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

    def assign_ranks(self, assignments: RankAssignments) -> None:
        """Start the ranks on these hosts and GPUs. Call it before `async with`.

        Raises: ConfigError if a GPU has too little memory.
        """
        gpu_bytes = [
            (assignment.gpu_name, assignment.gpu_bytes) for assignment in assignments.by_rank
        ]
        self._require_layout(
            has_reference=self._has_reference,
            critic=self._critic_config,
            gpus=[(name, size) for name, size in gpu_bytes if size is not None],
        )
        self._sharded.group.set_assignments(assignments)

    def count_flops(self, peak_flops: float) -> None:
        """Measure each rank's MFU, given its device's operations per second.

        Call it before `async with`.
        """
        self._sharded.group.count_flops()
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
        before = await self._sharded.times()  # of the critic and the reference
        report = await super().update(trajectories, advantages, reference_log_probs)
        times = await self._sharded.times()
        # of the update alone: the critic's and the reference's passes are in the timeline, but
        # would make its communication look larger
        measured = rank_metrics(times, report.metrics["update/seconds"], self._peak_flops)
        return UpdateReport(
            report.weight_version,
            report.metrics | measured,
            rank_slices(before, times),
            describe_ranks(measured),
        )

    def critic(self, config: CriticConfig, seed: int) -> PolicyCritic:
        """Return a critic that the ranks compute. Call it before `async with`.

        Args: those of `Critic`.
        """
        self._critic_config = config
        self._require_layout(has_reference=self._has_reference, critic=config)
        self._sharded.group.add_critic(config, seed)
        group = self._sharded.group
        return PolicyCritic(group, ShardedCriticWeights(group), config, seed)

    def reference(self) -> PolicyReference:
        """Return the policy as it is when the ranks start, which they score with.

        Call it before `async with`.
        """
        self._has_reference = True
        self._require_layout(has_reference=True, critic=self._critic_config)
        self._sharded.group.add_reference()
        return PolicyReference(self._sharded.reference_log_probs, self._check_drawn)

    @property
    def ranks(self) -> ShardedWeights:
        """The ranks."""
        return self._sharded


class ShardedCriticWeights:
    """`CriticWeights` that the ranks of a sharded learner share.

    Args:
        group: the ranks, with `add_critic` called before they start.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group, self._num_snapshots = group, 0

    async def optim_step(self) -> StepReport:
        """Take one optimizer step on every rank."""
        steps = self._group.together(rank.optim_step_critic() for rank in self._group.ranks)
        reports: list[StepReport] = await await_end(asyncio.ensure_future(steps))
        return reports[0]

    async def summed(self, sums: Sequence[ValueSums]) -> tuple[float, float]:
        """Return the sum of the losses and the number of clipped values."""
        # in float64, in which those of several ranks are added up
        return summed_values([each._replace(loss=each.loss.double()) for each in sums])

    async def snapshot(self, num_updates: int) -> RankTensors:
        """Copy the state on every rank; its file is written from there."""
        self._num_snapshots += 1
        number = self._num_snapshots
        staging = self._group.together(
            rank.stage_critic(number, num_updates) for rank in self._group.ranks
        )
        staged = await await_end(asyncio.ensure_future(staging))
        return RankTensors(self._group, number, "critic", staged[0]["critic"])

    async def restore(self, tensors: Mapping[str, Tensor], file: Path | None, prefix: str) -> None:
        """Continue from a snapshot. Each rank reads its own part of the file."""
        if file is None:
            self._num_snapshots += 1
            # ranks read their parts of a file; a state in memory is written to one first
            file = self._group.folder / f"critic-{self._num_snapshots}.safetensors"
            await asyncio.to_thread(save_file, dict(tensors), file)
            prefix = ""
        reading = self._group.restored(
            (file,),
            needed=lambda rank, paths: rank.needed_critic(paths[0], prefix),
            restore=lambda rank, paths: rank.restore_critic(paths[0], prefix),
        )
        await await_end(asyncio.ensure_future(reading))


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
