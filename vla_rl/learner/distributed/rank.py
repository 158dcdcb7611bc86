"""One rank of a sharded learner: an actor in a process of its own, with its device lane.

Every rank is sent the same calls in the same order. It decides nothing: which rows it computes,
whether a step is taken and what is refused come from the learner, and whether a step is skipped
from the norm over all ranks, so that no rank can wait for another in a different collective.
"""

import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from vla_rl.actors import actor_method
from vla_rl.algorithms import Denominators
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.weight_shards import ShardSocket, SharedParameters, WeightShard
from vla_rl.errors import CheckpointError
from vla_rl.learner.backend import MicroBatchSums
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.critic_backend import NETWORK, OPTIMIZER, ValueRows, ValueSums
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.distributed.host_rank import PIECE_BYTES, FilePiece, HostRank
from vla_rl.learner.distributed.messages import ParameterPiece
from vla_rl.learner.distributed.rank_parts import PolicySource, RankParts
from vla_rl.learner.distributed.rank_times import RankClock, RankTimes
from vla_rl.learner.distributed.rendezvous import Network, Rendezvous, join_group
from vla_rl.learner.distributed.sharding import LocalOperations
from vla_rl.learner.distributed.shared_training import RankShard
from vla_rl.learner.distributed.state import Entry, Part, ShardReader, split_part, write_parts
from vla_rl.learner.flops import LaneFlopCounter
from vla_rl.learner.imitation_backend import SftRows
from vla_rl.learner.optimizer import StepReport
from vla_rl.types import Observation

PASSES: Final = frozenset({"update", "log_probs", "reference", "values", "critic"})
"""Work on a rank's lane whose arithmetic is counted."""


class LearnerRank(HostRank):
    """A part of the rows, of the gradients and of the optimizer's state.

    Args:
        rank: number of this rank.
        source: the policy.
        config: loss, optimizer, and the number of ranks.
    """

    def __init__(self, rank: int, source: PolicySource, config: LearnerConfig) -> None:
        super().__init__()
        self._rank, self._source, self._config = rank, source, config
        # one thread for a rank on a CPU: with torch's default, eight ranks would run eight times as
        # many threads as there are cores
        self._lane = DeviceLane(num_threads())
        self._flop_counter: LaneFlopCounter | None = None
        self._flops = 0
        self._staged: dict[str, dict[int, dict[str, Part]]] = {}

    async def join_group(self, rendezvous: Rendezvous, network: Network | None) -> None:
        """Connect to the other ranks; `network` is what to use if they are on several hosts."""
        await self._lane.run(self._join_group, rendezvous, network, work="rendezvous")

    async def join(self, folder: str) -> None:
        """Load the policy from a folder here, and keep this rank's part of it."""
        await self._lane.run(self._join, Path(folder), work="join")
        self._shard = RankShard(self._rank, self._parts.policy, self._lane)
        if self._source.counts_flops:
            self._flop_counter = LaneFlopCounter(PASSES, LocalOperations)
            self._lane.add_observer(self._flop_counter)
        self._lane.add_observer(self._clock)

    async def gather_weights(self, clear: bool) -> None:
        """Gather the weights for the passes that follow; with `clear`, drop gradients first."""
        await self._lane.run(self._parts.policy.gather_weights, clear, work="gather")

    @actor_method(concurrent=True)
    async def forward_backward(
        self, rows: Decisions, counts: Denominators, compare: int | None, is_last: bool
    ) -> MicroBatchSums:
        """Add the gradient of a micro-batch; the last one adds the gradients of all ranks."""
        # concurrent, so that one micro-batch is prepared while the one before is computed; both
        # threads of the lane keep the order of arrival
        batch = await self._lane.prepare(self._parts.prepare, rows.observations)
        arguments = (batch, rows, counts, compare, is_last)
        return await self._lane.run(self._parts.forward_backward, *arguments, work="update")

    @actor_method(concurrent=True)
    async def imitate(self, rows: SftRows, seed: int, num_tokens: int, is_last: bool) -> Tensor:
        """Add the gradient of a micro-batch of supervised learning; return its part of the loss."""
        batch = await self._lane.prepare(self._parts.prepare_sft_batch, rows.observations, seed)
        arguments = (batch, rows, seed, num_tokens, is_last)
        return await self._lane.run(self._parts.imitate, *arguments, work="update")

    @actor_method(concurrent=True)
    async def score(self, rows: Decisions, of_reference: bool) -> Tensor:
        """Return the log-probs of all tokens of some rows, float32 [M, T]."""
        batch = await self._lane.prepare(self._parts.prepare, rows.observations)
        work = "reference" if of_reference else "log_probs"
        return await self._lane.run(self._parts.score, batch, rows, of_reference, work=work)

    async def scatter_weights(self) -> None:
        """Drop the gathered weights after scoring."""
        await self._lane.run(self._parts.policy.sharded.scatter, work="scatter")

    async def drop_prefixes(self) -> int:
        """Free what the policy keeps of the observations of an update; return its bytes."""
        return await self._lane.run(self._parts.drop_prefixes, work="other")

    async def optim_step(self) -> StepReport:
        """Clip by the norm over all ranks, and update this rank's part of the weights."""
        return await self._lane.run(self._parts.policy.optim_step, work="step")

    async def gather_critic(self, clear: bool) -> None:
        """Gather the critic's weights; with `clear`, drop its gradients first."""
        await self._lane.run(self._parts.gather_critic, clear, work="gather")

    @actor_method(concurrent=True)
    async def critic_values(self, observations: tuple[Observation, ...]) -> Tensor:
        """Return the critic's values of some observations, float32 [M]."""
        batch = await self._lane.prepare(self._parts.prepare, observations)
        return await self._lane.run(self._parts.compute_values, batch, work="values")

    @actor_method(concurrent=True)
    async def fit(
        self, rows: ValueRows, num_rows: int, is_masked: bool, is_last: bool
    ) -> ValueSums:
        """Add the gradient of a critic's micro-batch; return its loss and number of clipped values.

        Masked rows only take part, and add exact zeros. The last micro-batch adds the gradients of all
        ranks.
        """
        batch = await self._lane.prepare(self._parts.prepare, rows.observations)
        arguments = (batch, rows, num_rows, is_masked, is_last)
        return await self._lane.run(self._parts.fit, *arguments, work="critic")

    async def scatter_critic(self) -> None:
        """Drop the critic's gathered weights after its values."""
        await self._lane.run(self._parts.scatter_critic, work="scatter")

    async def optim_step_critic(self) -> StepReport:
        """Update this rank's part of the critic."""
        return await self._lane.run(self._parts.optim_step_critic, work="step")

    async def weights(self) -> AsyncIterator[ParameterPiece]:
        """Yield this rank's part of the trained weights, a piece at a time."""
        pieces = self._parts.policy.pieces(PIECE_BYTES)
        while (
            found := await self._lane.run(partial(next, pieces, None), work="publish")
        ) is not None:
            name, start, run, data = found
            yield ParameterPiece(name, start, run, data.numpy())

    async def write_weights(self, memory: SharedParameters) -> None:
        """Write this rank's part of the trained weights into memory that engines open."""
        await self._lane.run(self._parts.policy.write_pieces, memory, PIECE_BYTES, work="publish")

    async def describe_shard(self, begins: dict[str, int], row_bytes: int) -> WeightShard:
        """Return what this rank holds of the newest weights, with its digest.

        Args: those of `ShardHolders.list_shards`.
        """
        return await self._lane.run(self._shard.describe_shard, begins, row_bytes, work="publish")

    async def new_link_key(self) -> str:
        """Return the public key with which this rank will connect to a host."""
        return self._shard.new_link_key()

    @actor_method(concurrent=True)
    async def send_shard(self, link_key: str, socket: ShardSocket, state: int) -> None:
        """Send the shard that `describe_shard` described to a host, until it closes its socket.

        Args:
            link_key: what `new_link_key` returned.
            socket: where the host receives it.
            state: that of the shard.

        Raises: WeightsNotGiven if the weights have changed, or the host cannot be reached.
        """
        await self._shard.send_shard(link_key, socket, state)

    async def times(self) -> RankTimes:
        """Return what this rank did since the last call."""
        times = await self._lane.run(self._clock.take_times, work="other")
        if self._flop_counter is None:
            return times
        flops, before = sum(self._flop_counter.flops().values()), self._flops
        self._flops = flops
        return replace(times, flops=flops - before)

    async def stage(self, number: int) -> dict[str, dict[str, Entry]]:
        """Copy this rank's part of the policy's state; return all tensors of its two files.

        At most two copies are kept.
        """
        return self._keep(
            number, await self._lane.run(self._parts.copied, self._rank == 0, work="checkpoint")
        )

    async def stage_critic(self, number: int, num_updates: int) -> dict[str, dict[str, Entry]]:
        """Copy this rank's part of the critic's state; return all tensors of its file."""
        copied = await self._lane.run(
            self._parts.copied_critic, self._rank == 0, num_updates, work="checkpoint"
        )
        return self._keep(number, copied)

    @actor_method(concurrent=True)
    async def write_staged(self, number: int, file: str, path: str, begins: dict[str, int]) -> None:
        """Write a staged part of one file in place. Raises: CheckpointError."""
        parts = self._staged_part(number, file)
        # on the host's thread: the next update computes meanwhile
        await self._lane.prepare(_write, Path(path), parts, begins)

    @actor_method(concurrent=True)
    async def pieces(
        self, number: int, file: str, begins: dict[str, int]
    ) -> AsyncIterator[FilePiece]:
        """Yield a staged part of one file, as `write_staged` would write it."""
        for name, part in self._staged_part(number, file).items():
            for at, run, distance, data in split_part(part, begins[name], PIECE_BYTES):
                yield FilePiece(at, run, distance, data)

    async def needed(self, policy: str, optimizer: str) -> list[list[tuple[int, int]]]:
        """Return the bytes that `restore` reads of each of the two files, as ranges."""
        readers = ShardReader(Path(policy)), ShardReader(Path(optimizer))
        return await self._lane.run(self._parts.policy.needed, *readers, work="checkpoint")

    async def needed_critic(self, path: str, prefix: str) -> list[list[tuple[int, int]]]:
        """Return the bytes that `restore_critic` reads of the file, as ranges."""
        needed = self._parts.trained_critic.needed
        readers = _critic_readers(path, prefix)
        found = await self._lane.run(needed, *readers, work="checkpoint")
        return [[each for ranges in found for each in ranges]]

    async def restore(self, policy: str, optimizer: str) -> None:
        """Read this rank's part of weights and optimizer. Raises: CheckpointError."""
        readers = ShardReader(Path(policy)), ShardReader(Path(optimizer))
        await self._lane.run(self._parts.policy.restore, *readers, work="checkpoint")

    async def restore_critic(self, path: str, prefix: str) -> None:
        """Read this rank's part of the critic; `prefix` begins its names. Raises: CheckpointError."""
        restore = self._parts.trained_critic.restore
        await self._lane.run(restore, *_critic_readers(path, prefix), work="checkpoint")

    async def on_stop(self) -> None:
        """Leave the group."""
        await self._lane.close()
        # left in order: a rank that just ends lets the others report a lost connection at the end
        # of every run
        if dist.is_initialized():
            dist.destroy_process_group()
        await super().on_stop()

    def _staged_part(self, number: int, file: str) -> dict[str, Part]:
        parts = self._staged.get(file, {}).pop(number, None)
        if parts is None:
            raise CheckpointError(
                f"the state of snapshot {number} was replaced by newer ones before it was written"
            )
        return parts

    def _keep(self, number: int, files: dict[str, dict[str, Part]]) -> dict[str, dict[str, Entry]]:
        for file, parts in files.items():
            kept = self._staged.setdefault(file, {})
            kept[number] = parts
            # two: one is being written while the next is taken; a third would be a whole optimizer
            # state more in memory
            while len(kept) > 2:
                del kept[min(kept)]
        return {
            file: {name: part.whole for name, part in parts.items()}
            for file, parts in files.items()
        }

    def _join_group(self, rendezvous: Rendezvous, network: Network | None) -> None:
        device = torch.device(self._source.devices[self._rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # both on a GPU: tensors that lie on the CPU have no group with NCCL alone
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        join_group(rendezvous, network, self._rank, self._config.ranks, backend)

    def _join(self, folder: Path) -> None:
        device = torch.device(self._source.devices[self._rank])
        self._clock = RankClock(device)
        self._parts = RankParts(self._source, folder, device, self._config, self._clock)


def num_threads() -> int:
    """Return torch's threads of a rank: those of OMP_NUM_THREADS, else one."""
    return int(os.environ.get("OMP_NUM_THREADS") or 1)


def _critic_readers(path: str, prefix: str) -> tuple[ShardReader, ShardReader]:
    readers = [ShardReader(Path(path), f"{prefix}{part}") for part in (NETWORK, OPTIMIZER)]
    return readers[0], readers[1]


def _write(path: Path, parts: dict[str, Part], begins: dict[str, int]) -> None:
    try:
        write_parts(path, parts, begins)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
