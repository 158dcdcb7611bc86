"""The critic of a sharded learner: its rows are dealt to the same ranks that train the policy."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vla_rl.actors.completion import to_its_end
from vla_rl.learner.config import CriticConfig, LearnerConfig
from vla_rl.learner.distributed.group import RankGroup
from vla_rl.learner.distributed.in_order import idle_row, in_order
from vla_rl.learner.distributed.messages import pack_observed, pack_seen
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.staged import RankTensors
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.plan import plan_passes
from vla_rl.learner.value_passes import ValueRows, ValueSums, num_read, summed_values
from vla_rl.types import Observation


class RankCriticPasses:
    """`CriticPasses` over the ranks of a sharded learner.

    Args:
        group: the ranks, which were told to hold a critic before they start.
        learner: number of ranks, and what each holds.
        config: sizes of the critic's micro-batches.
    """

    def __init__(self, group: RankGroup, learner: LearnerConfig, config: CriticConfig) -> None:
        self._group, self._learner, self._size = group, learner, config.micro_batch_size
        self._num_snapshots = 0

    async def values(self, observations: Sequence[Observation]) -> Tensor:
        """Compute values, float32 [N] on the CPU."""
        return await to_its_end(asyncio.ensure_future(self._values(observations)))

    async def accumulate(self, rows: ValueRows) -> list[ValueSums]:
        """Compute the gradient of the mean loss of a mini-batch."""
        return await to_its_end(asyncio.ensure_future(self._accumulate(rows)))

    async def step(self) -> StepReport:
        """Take one optimizer step on every rank."""
        steps = self._group.together(rank.step_critic() for rank in self._group.ranks)
        reports: list[StepReport] = await to_its_end(asyncio.ensure_future(steps))
        return reports[0]

    async def summed(self, sums: Sequence[ValueSums]) -> tuple[float, float]:
        """Return the sum of the losses and the number of clipped values."""
        return summed_values(sums)

    async def snapshot(self, num_updates: int) -> RankTensors:
        """Copy the state on every rank; its file is written from there."""
        self._num_snapshots += 1
        number = self._num_snapshots
        staging = self._group.together(
            rank.stage_critic(number, num_updates) for rank in self._group.ranks
        )
        described = await to_its_end(asyncio.ensure_future(staging))
        return RankTensors(self._group, number, "critic", described[0]["critic"])

    async def restore(self, tensors: Mapping[str, Tensor], file: Path | None, prefix: str) -> None:
        """Continue from a snapshot. Each rank reads its own part of the file."""
        if file is None:
            self._num_snapshots += 1
            file = self._group.folder / f"critic-{self._num_snapshots}.safetensors"
            await asyncio.to_thread(save_file, dict(tensors), file)
            prefix = ""
        reading = self._group.restored(
            (file,),
            needed=lambda rank, paths: rank.needed_critic(paths[0], prefix),
            restore=lambda rank, paths: rank.restore_critic(paths[0], prefix),
        )
        await to_its_end(asyncio.ensure_future(reading))

    async def _values(self, observations: Sequence[Observation]) -> Tensor:
        lengths = num_read(observations)
        dealt, num_passes = self._dealt(lengths)
        values, idle = torch.zeros(len(observations)), idle_row(lengths)

        async def judge(rank: LearnerRank, parts: Sequence[Tensor]) -> None:
            await rank.begin_critic(False)
            padded = [*parts, *[idle] * (num_passes - len(parts))]

            def call(index: Tensor) -> Awaitable[Any]:
                return rank.judge(pack_observed([beside[row] for row in index.tolist()]))

            async with self._group.at_hand(rank, observations, padded) as beside:
                found = await in_order(call, padded)
            for index, result in zip(parts, found, strict=False):
                values[index] = torch.tensor(result)
            await rank.end_critic()

        await self._group.together(judge(*pair) for pair in self._group.dealt(dealt))
        return values

    async def _accumulate(self, rows: ValueRows) -> list[ValueSums]:
        lengths = num_read(rows.observations)
        dealt, least = self._dealt(lengths)
        num_rows, idle = len(rows.target), idle_row(lengths)

        async def fit(rank: LearnerRank, parts: Sequence[Tensor]) -> list[tuple[float, float]]:
            await rank.begin_critic(True)
            num_passes = max(len(parts), least, 1)

            def call(number: int) -> Awaitable[Any]:
                is_masked = number >= len(parts)
                part = beside.rows(idle if is_masked else parts[number])
                seen = pack_seen(part, is_masked=is_masked)
                return rank.fit(seen, num_rows, number == num_passes - 1)

            seen, needed = rows.observations, [*parts, idle]
            async with self._group.at_hand(rank, seen, needed) as observations:
                beside = rows._replace(observations=observations)
                found: list[tuple[float, float]] = await in_order(call, range(num_passes))
            return found[: len(parts)]

        sums = await self._group.together(fit(*pair) for pair in self._group.dealt(dealt))
        return [
            ValueSums(*(torch.tensor(number, dtype=torch.float64) for number in each))
            for of_rank in self._group.counted(sums)
            for each in of_rank
        ]

    def _dealt(self, lengths: Tensor) -> tuple[tuple[tuple[Tensor, ...], ...], int]:
        """Return the micro-batches of each rank, and the least number that each has to compute."""
        dealt = plan_passes(lengths, self._size, self._learner.row_groups)
        # with weights in shards each pass is a collective of all ranks
        is_padded = self._learner.shard == "weights"
        return dealt, max(map(len, dealt)) if is_padded else 0
