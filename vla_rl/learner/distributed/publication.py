"""The ranks' weights on their way to every engine that acts with them.

    engines on other hosts                     receive them from the ranks over the network
    engines in other processes of this host    open memory that the ranks write into
    an engine in this process                  reads the model here, which gets them piece by piece

The model here follows if an engine needs it, or if the others cannot be served so.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import TokenModel
from vla_rl.engines.weight_shards import (
    ShardSink,
    ShardSocket,
    SharedParameters,
    SharedWeightSink,
    WeightShard,
)
from vla_rl.errors import ActorDied, HostNotReached, WeightsNotGiven
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.distributed.group import RankGroup
from vla_rl.learner.distributed.messages import ParameterPiece
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.state import write_runs

logger = logging.getLogger(__name__)


class RankPublication:
    """Publishes the weights of ranks, and brings them to the model of this process.

    Args:
        model: the policy; it computes nothing here.
        group: the ranks.
        lane: replaces the weights of the model, between two batches of an engine.
        sinks: engines that get the new weights.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        group: RankGroup,
        lane: DeviceLane,
        sinks: Sequence[WeightSink],
    ) -> None:
        self._model, self._group, self._lane = model, group, lane
        self._host_sinks = [each for each in sinks if isinstance(each, ShardSink)]
        self._local_sinks: list[WeightSink] = [
            each for each in sinks if each not in self._host_sinks
        ]
        self._shards = RankShards(group)
        self.is_model_old = False
        """Whether the ranks have newer weights than the model here."""

    async def publish(self, version: int) -> None:
        """Send the ranks' newest weights to all engines, in a version.

        Raises: RankFailed; what an engine raises.
        """
        self.is_model_old = True
        # without an engine here the model stays as it is: for a policy of 70 MB this process grew
        # by 205 MB in each publication, and by 0.5 without the copy
        if self._local_sinks or not self._host_sinks:
            await self._publish_locally(version)
        await self._publish_to_hosts(version)

    async def publish_model(self, version: int) -> None:
        """Publish weights that the model here has too. Raises: as `publish`."""
        await self._lane.run(self._apply, version, work="publish")
        await self._publish_to_hosts(version)

    async def receive_weights(self) -> None:
        """Replace the model's weights by the ranks'. Raises: RankFailed."""
        loop = asyncio.get_running_loop()
        await self._group.together([self._lane.run(self._receive, None, loop, work="publish")])

    async def _publish_locally(self, version: int) -> None:
        # all or none: engines of one version have to get it in the same way, or one would act with
        # it before the other
        memories = await self._lane.run(self._open_memories, version, work="publish")
        if memories is None:
            loop = asyncio.get_running_loop()
            receiving = self._lane.run(self._receive, version, loop, work="publish")
            await self._group.together([receiving])
            return
        # into the memory of engines in other processes, which generate meanwhile
        for each in memories:
            await self._group.together(
                self._write(number, rank, each) for number, rank in enumerate(self._group.ranks)
            )
        await self._lane.run(self._apply_shared, version, work="publish")

    async def _publish_to_hosts(self, version: int) -> None:
        # a list of its own: a sink that cannot be reached changes sides below
        for sink in list(self._host_sinks):
            try:
                await sink.receive_shards(
                    self._shards, self._model.network, version, is_current=not self.is_model_old
                )
            except WeightsNotGiven as fault:
                logger.warning(
                    "weights %d go to other hosts through this process instead of from the ranks: "
                    "%s",
                    version,
                    fault,
                )
                if isinstance(fault, HostNotReached):  # it will not be in the next update either
                    self._host_sinks.remove(sink)
                    self._local_sinks.append(sink)
                if self.is_model_old:
                    await self.receive_weights()
                await self._lane.run(
                    sink.apply_weights, self._model.network, version, work="publish"
                )

    async def _write(self, number: int, rank: LearnerRank, memory: SharedParameters) -> None:
        """Have a rank's part of the weights in memory that engines open."""
        if not self._group.other_hosts.is_on_other_host(number):
            await rank.write_weights(memory)
            return
        parameters = dict(self._model.network.named_parameters())
        async for piece in rank.weights():
            await asyncio.to_thread(_write_piece, piece, parameters[piece.name], memory)

    def _open_memories(self, version: int) -> list[SharedParameters] | None:
        """Return where the ranks can write for each engine; None unless they can for all."""
        found: list[SharedParameters] = []
        for sink in self._local_sinks:
            memory = (
                sink.stage_shared(self._model.network, version)
                if isinstance(sink, SharedWeightSink)
                else None
            )
            if memory is None:
                return None
            found.append(memory)
        return found or None

    def _apply_shared(self, version: int) -> None:
        for sink in self._local_sinks:
            assert isinstance(sink, SharedWeightSink)
            sink.apply_shared(version)

    def _receive(self, version: int | None, loop: asyncio.AbstractEventLoop) -> None:
        """Replace the model's weights by the ranks', on the device lane; with a version, publish them.

        The lane is held meanwhile: no batch sees two versions, and no second copy is needed.
        """
        parameters = dict(self._model.network.named_parameters())
        with torch.no_grad():
            for rank in self._group.ranks:
                stream = rank.weights()
                while True:
                    # the lane is a thread and the ranks are on the loop: it waits here, so that no
                    # batch acts on half of a version
                    asked = asyncio.run_coroutine_threadsafe(_next(stream), loop)
                    piece = asked.result()
                    if piece is None:
                        break
                    _put(piece, parameters[piece.name])
        self.is_model_old = False
        if version is not None:
            self._apply(version)

    def _apply(self, version: int) -> None:
        for sink in self._local_sinks:
            sink.apply_weights(self._model.network, version)


async def _next(stream: AsyncIterator[ParameterPiece]) -> ParameterPiece | None:
    return await anext(stream, None)


def _write_piece(piece: ParameterPiece, parameter: Tensor, memory: SharedParameters) -> None:
    """Write a piece of a rank of another host into memory of this one. Raises: OSError."""
    size, num_rows = parameter.element_size(), parameter.shape[0] if parameter.ndim else 1
    row = parameter.nbytes // max(num_rows, 1)
    with Path(memory.path).open("r+b") as file:
        for begin in memory.begins[piece.name]:
            at = begin + piece.start * size
            write_runs(file.fileno(), piece.data, at, piece.run * size, row)


def _put(piece: ParameterPiece, parameter: Tensor) -> None:
    # copied: what arrives is read-only, and its slot in shared memory is needed for the next
    numbers = torch.from_numpy(piece.data.copy()).view(parameter.dtype).view(-1, piece.run)
    row_size = parameter.numel() // max(parameter.shape[0] if parameter.ndim else 1, 1)
    target = parameter.data.view(-1)[piece.start :].as_strided(numbers.shape, (row_size, 1))
    target.copy_(numbers)


class RankShards:
    """`ShardHolders` over the ranks of a sharded learner.

    A rank that dies ends all ranks, also while it sends its shard; a host that dies ends none.

    Args: `group`, the ranks.
    """

    def __init__(self, group: RankGroup) -> None:
        self._group, self.turn = group, group.turn

    async def describe_shards(self, begins: Mapping[str, int], row_bytes: int) -> list[WeightShard]:
        """Return what each rank holds. Raises: RankFailed."""
        found = await self._group.together(
            rank.describe_shard(dict(begins), row_bytes) for rank in self._group.ranks
        )
        assignments = self._group.assignments.by_rank
        return [
            replace(shard, host=assignments[shard.holder].host)
            for shard in found
            if shard.num_bytes
        ]

    async def new_links(self, shards: Sequence[WeightShard]) -> list[str]:
        """Return the ranks' public keys. Raises: RankFailed."""
        ranks = self._group.ranks
        return await self._group.each(ranks[shard.holder].new_link_key() for shard in shards)

    async def send_shards(
        self, shards: Sequence[WeightShard], links: Sequence[str], sockets: Sequence[ShardSocket]
    ) -> None:
        """Send each shard to its socket. Raises: WeightsNotGiven, RankFailed."""
        sending = [
            asyncio.ensure_future(
                self._group.ranks[shard.holder].send_shard(link, socket, shard.state)
            )
            for shard, link, socket in zip(shards, links, sockets, strict=True)
        ]
        try:
            done, _ = await asyncio.wait(sending, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for each in done if (error := each.exception()) is not None]
        finally:
            # the sockets of one host are of use together only
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
        for error in errors:
            if isinstance(error, ActorDied):
                await self._group.fail(error)
        for error in errors:
            raise error
