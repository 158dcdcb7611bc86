"""The weights that several ranks train: steps, publication, state.

learner ──► plan ──► rank 0: micro-batch, micro-batch, ...  ─┐ sums      gradients meet in the
                     rank 1: micro-batch, ...               ─┘           last backward pass
        ◄── weights, piece by piece, from every rank's own part
engines in other processes ◄── weights, from the ranks: `publication`
checkpoint ◄── tensors that the ranks have copied, and write in place
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from vla_rl.actors import Runtime
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import CheckpointError, RankFailed
from vla_rl.learner.backend import MicroBatchSums, WeightSink
from vla_rl.learner.checkpoint.state import (
    StagedTensors,
    TrainingState,
    random_state,
    set_random_state,
)
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.distributed.group import RankGroup
from vla_rl.learner.distributed.host_rank import FilePiece
from vla_rl.learner.distributed.publication import RankPublication
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.rank_times import RankTimes
from vla_rl.learner.distributed.state import Entry, count_bytes, create_file, write_runs
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.scoring import score_decisions
from vla_rl.util.atomic_files import writing_folder
from vla_rl.util.tasks import await_end

T = TypeVar("T")


class ShardedWeights:
    """`TrainedWeights` that learner ranks share. Open it with `async with`.

    Args:
        model: the policy. It is saved for the ranks when they start, and its weights are replaced
            by theirs after every update; it computes nothing here.
        runtime: starts the ranks.
        lane: replaces the weights, between two batches of the engine.
        config: loss, optimizer and ranks.
        publish_to: engines that get the new weights with every update.
        weight_version: number of updates already applied.
        member: name of the policy in a team of several; "" in a team of one.
        lost_gpus: numbers of the GPUs that no rank may use.
        stay_with_ranks: whether new weights stay with the ranks until they are fetched, because nothing
            acts with them here.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        runtime: Runtime,
        lane: DeviceLane,
        config: LearnerConfig,
        publish_to: Sequence[WeightSink],
        weight_version: int,
        member: str = "",
        lost_gpus: Collection[int] = (),
        *,
        stay_with_ranks: bool = False,
    ) -> None:
        self._model, self._lane, self._size = model, lane, config.micro_batch_size
        self._stay_with_ranks = stay_with_ranks
        self._weight_version = weight_version
        self.group = RankGroup(runtime, config, member, lost_gpus)
        """The processes."""
        self._publication = RankPublication(model, self.group, lane, publish_to)
        self._num_snapshots = 0

    async def __aenter__(self) -> Self:
        await self.group.start_ranks(self._model)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is not None and RankFailed.found_in(error) is not None:
                # a new start from the beginning, and a reference, need the first weights of all
                # policies of a team, also of those whose ranks did not fail
                await self._lane.run(self._take_first_weights)
            elif error is None and self._publication.is_model_old:
                await self.fetch_weights()
        finally:
            await self.group.close()

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._weight_version

    @property
    def ranks(self) -> Sequence[LearnerRank]:
        """Handles of the ranks."""
        return tuple(self.group.ranks)

    async def reference_log_probs(self, decisions: Decisions) -> Tensor:
        """Score every token under the weights that the ranks began with."""
        return await score_decisions(self.group, decisions, self._size, of_reference=True)

    async def times(self) -> list[RankTimes]:
        """Return what each rank did since the last call."""
        times = await self._to_its_end(
            self.group.together(rank.times() for rank in self.group.ranks)
        )
        # one clock for all: on two clocks, a rank would seem to wait for another that had long
        # finished
        offsets = self.group.clock_offsets_s
        return [each.shifted(offset) for each, offset in zip(times, offsets, strict=True)]

    async def read_sums(self, sums: list[MicroBatchSums]) -> list[MicroBatchSums]:
        """Return the sums in float64, in which those of several ranks are added up."""
        return [each.in_float64() for each in sums]

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses, in float64, in which those of several ranks are added up."""
        return float(torch.stack(list(losses)).double().sum())

    async def optim_step(self, publish: bool) -> StepReport:
        """Take one optimizer step on every rank."""
        return await self._to_its_end(self._optim_step(publish))

    async def publish_unchanged(self) -> None:
        """Publish the same weights as a new version."""
        publication = self._publication
        publish = publication.publish if publication.is_model_old else publication.publish_model
        await self._to_its_end(self._published(publish))

    async def fetch_weights(self) -> None:
        """Replace the model's weights by the ranks'; nothing is published."""
        await self._to_its_end(self._publication.receive_weights())

    async def snapshot(self) -> TrainingState:
        """Copy the state on every rank; its files are written from there."""
        return await self._to_its_end(self._snapshot())

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it. Each rank reads its own part of the files."""
        await self._to_its_end(self._restore(state))

    async def _optim_step(self, publish: bool) -> StepReport:
        reports = await self.group.together(rank.optim_step() for rank in self.group.ranks)
        if publish:
            publication = self._publication
            stays = self._stay_with_ranks
            await self._published(publication.publish_model if stays else publication.publish)
        report: StepReport = reports[0]
        return report

    def _take_first_weights(self) -> None:
        """Set the weights to those that the ranks began with."""
        first = type(self._model).load(self.group.policy_folder)  # type: ignore[attr-defined]
        self._model.network.load_state_dict(first.network.state_dict())
        self._publication.is_model_old = False

    async def _published(self, publish: Callable[[int], Awaitable[None]]) -> None:
        # the version rises after the publication: if that fails, the next attempt has the same
        # number
        await publish(self._weight_version + 1)
        self._weight_version += 1

    async def _snapshot(self) -> TrainingState:
        self._num_snapshots += 1
        number = self._num_snapshots
        staged = await self.group.together(rank.stage(number) for rank in self.group.ranks)
        policy, optimizer = (
            RankTensors(self.group, number, name, staged[0][name])
            for name in ("policy", "optimizer")
        )
        return TrainingState(
            weight_version=self._weight_version,
            policy=policy,
            optimizer=optimizer,
            rng=random_state(),
            policy_files=dict(self._model.checkpoint_files()),
        )

    async def _restore(self, state: TrainingState) -> None:
        folder = state.folder
        if folder is None:
            self._num_snapshots += 1
            scratch = self.group.folder / f"state-{self._num_snapshots}"
            folder = await asyncio.to_thread(_write_state, state, scratch)
        files = folder / "policy" / "model.safetensors", folder / "optimizer.safetensors"
        await self.group.restored(
            files,
            needed=lambda rank, paths: rank.needed(*paths),
            restore=lambda rank, paths: rank.restore(*paths),
        )
        # the model of this process reads the whole file: it acts, or gives its engines what is not
        # trained
        tensors = await asyncio.to_thread(load_file, files[0])
        await self._lane.run(self._model.load_checkpoint_tensors, tensors, work="checkpoint")
        self._publication.is_model_old = False
        set_random_state(state.rng)
        await self._publication.publish_model(state.weight_version)
        self._weight_version = state.weight_version

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await await_end(asyncio.ensure_future(work))


def _write_state(state: TrainingState, folder: Path) -> Path:
    """Write a state's tensors as a checkpoint does, for ranks to read."""
    with writing_folder(folder, 0) as writer:
        for name, tensors in (
            ("policy/model.safetensors", state.policy),
            ("optimizer.safetensors", state.optimizer),
        ):
            if isinstance(tensors, StagedTensors):
                tensors.write_file(writer.new_path(name))
            else:
                writer.write_tensors(name, tensors)
    return folder


class RankTensors:
    """Tensors of one file that the ranks have staged.

    Args:
        group: the ranks.
        number: number of the snapshot.
        name: name of the file among those that were staged.
        entries: its tensors.
    """

    def __init__(self, group: RankGroup, number: int, name: str, entries: dict[str, Entry]) -> None:
        self._group, self._number, self._name = group, number, name
        self.entries, self._loop = entries, asyncio.get_running_loop()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return count_bytes(self.entries)

    def write_file(self, path: Path) -> None:
        """Write the file, from any thread but the loop's. Raises: CheckpointError, RankFailed."""
        self.write_into(path, create_file(path, self.entries))

    def write_into(self, path: Path, begins: Mapping[str, int]) -> None:
        """Write the tensors into a file, each at its byte of `begins`."""
        # checkpoints are written in a thread, and the ranks are asked on the loop: the thread waits
        # for the loop, never the other way round
        writing = write_staged(self._group, self._number, self._name, path, dict(begins))
        asyncio.run_coroutine_threadsafe(writing, self._loop).result()


class JoinedTensors:
    """Tensors of one file that the ranks of several learners have staged.

    Args:
        parts: those of each learner, by the beginning of their names in the file.
    """

    def __init__(self, parts: Mapping[str, StagedTensors]) -> None:
        self._parts: dict[str, RankTensors] = {}
        for prefix, part in parts.items():
            assert isinstance(part, RankTensors)
            self._parts[prefix] = part

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self._parts.values())

    def write_file(self, path: Path) -> None:
        """Write the file, from any thread but the loop's. Raises: CheckpointError, RankFailed."""
        entries = {
            f"{prefix}{name}": entry
            for prefix, part in self._parts.items()
            for name, entry in part.entries.items()
        }
        begins = create_file(path, entries)
        for prefix, part in self._parts.items():
            part.write_into(path, {name: begins[f"{prefix}{name}"] for name in part.entries})


async def write_staged(
    group: RankGroup, number: int, name: str, path: Path, begins: dict[str, int]
) -> None:
    """Let every rank write its part of a staged file; write those of other hosts here.

    Raises: CheckpointError, RankFailed.
    """

    async def write(rank: int) -> None:
        if not group.other_hosts.is_on_other_host(rank):
            await group.ranks[rank].write_staged(number, name, str(path), begins)
            return
        async for piece in group.ranks[rank].pieces(number, name, begins):
            await asyncio.to_thread(_write_piece, path, piece)

    await group.each(write(rank) for rank in range(len(group.ranks)))


def _write_piece(path: Path, piece: FilePiece) -> None:
    try:
        with path.open("r+b") as file:
            write_runs(file.fileno(), piece.data, piece.at, piece.run, piece.distance)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
