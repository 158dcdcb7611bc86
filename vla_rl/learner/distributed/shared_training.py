"""A network that the ranks train together: this rank's shard of it.

The policy is one such network, and a critic another; each rank makes the same calls in the same order.

Engines on other hosts receive the newest weights from the ranks, each shard on an encrypted connection:

    rank: its first pieces ──► host: one question for each piece that has its offset ──► rank: the next

The rank connects, because hosts have ports that others may reach and the machine of the control process
may have none. The pieces that no question came for bound what is on the way. A host may receive the
weights until they change, also while the next update is computed: a host that joins meanwhile needs the
version that the others act with.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
import zmq
from torch import Tensor, nn

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.direct_link import DirectLink, make_link_keys
from vla_rl.actors.remote.host_connection import LINK_WITHIN_S
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.weight_shards import (
    SHARD_PIECES_AHEAD,
    RowPart,
    ShardDigest,
    ShardPiece,
    ShardSocket,
    SharedParameters,
    WeightShard,
    split_shard,
)
from vla_rl.errors import CheckpointError, HostNotReached, WeightsNotGiven
from vla_rl.learner.config import OptimizerConfig
from vla_rl.learner.distributed.sharding import ShardedModule
from vla_rl.learner.distributed.state import (
    Part,
    ShardReader,
    copy_part,
    split_parameter,
    write_runs,
)
from vla_rl.learner.optimizer import MASTER, PolicyOptimizer, StepReport
from vla_rl.util.tasks import run_in_thread


class SharedTraining:
    """This rank's part of a network and of its optimizer. All methods run on the device lane.

    Args:
        network: holds the trained parameters; `sharded.module.network`.
        sharded: the module that computes with them, sharded.
        config: settings of the optimizer.
        names: the network's name of each tensor of a checkpoint; None if they are the same.
    """

    def __init__(
        self,
        network: nn.Module,
        sharded: ShardedModule,
        config: OptimizerConfig,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.sharded, self._network = sharded, network
        # right after sharding: while weights are gathered, a network lists other parameters
        self.optimizer = PolicyOptimizer(network, config, sharded.compute_norm)
        self._names = names or {name: name for name in network.state_dict()}
        self.num_changes = 0
        """Number of times that the weights were changed, by a step or by a restore."""

    def gather_weights(self, clear: bool) -> None:
        """Gather the weights for the passes that follow; with `clear`, drop gradients first."""
        if clear:
            self.optimizer.zero_grad()
        self.sharded.gather()

    def optim_step(self) -> StepReport:
        """Clip by the norm over all ranks, and update this rank's part of the weights."""
        self.sharded.scatter()
        self.num_changes += 1
        return self.optimizer.step()

    def pieces(self, num_bytes: int) -> Iterator[tuple[str, int, int, Tensor]]:
        """Yield this rank's parts of the trained weights: name, first index, run, bytes."""
        for name, parameter in self.optimizer.parameters.items():
            for start, run, data in split_parameter(parameter, self._saved_dtype(name), num_bytes):
                yield name, start, run, data

    def write_pieces(self, memory: SharedParameters, num_bytes: int) -> None:
        """Write this rank's parts of the trained weights into memory that engines open.

        Raises: OSError.
        """
        with Path(memory.path).open("r+b") as file:
            for name in self.optimizer.parameters:
                for start, run, distance, data in self._byte_pieces(name, num_bytes):
                    for begin in memory.begins[name]:
                        write_runs(file.fileno(), data, begin + start, run, distance)

    def parts(self, begins: Mapping[str, int], num_bytes: int) -> Iterator[RowPart]:
        """Yield this rank's parts of the trained weights in rising order of their offsets in a row.

        Args:
            begins: byte of the row at which each parameter begins.
            num_bytes: most bytes of one part, about.
        """
        for name in sorted(self.optimizer.parameters, key=begins.__getitem__):
            for start, run, distance, data in self._byte_pieces(name, num_bytes):
                yield begins[name] + start, run, distance, data

    def copied_network(self, *, is_first: bool) -> dict[str, Part]:
        """Copy this rank's part of the network, in the types that one process saves."""
        state, trained = self._network.state_dict(), self.optimizer.parameters
        copied = partial(copy_part, is_first_rank=is_first)
        return {
            name: copied(state[inner], self._saved_dtype(inner) if inner in trained else None)
            for name, inner in self._names.items()
        }

    def copied_optimizer(self, *, is_first: bool) -> dict[str, Part]:
        """Copy this rank's part of the optimizer's state, as one process saves it."""
        copied = partial(copy_part, is_first_rank=is_first)
        tensors = dict(self.optimizer.state_tensors())
        tensors |= {
            f"{MASTER}/{name}": tensor
            for name, tensor in self.optimizer.parameters.items()
            if self._saved_dtype(name) != torch.float32
        }
        return {name: copied(tensor, None) for name, tensor in tensors.items()}

    def restore(self, weights: ShardReader, saved: ShardReader) -> None:
        """Read this rank's part of weights and optimizer. Raises: CheckpointError."""
        self.sharded.scatter()
        self.num_changes += 1
        state = self._network.state_dict()
        # a tensor more is as wrong as one less: it is the checkpoint of another policy
        unknown = sorted(weights.names - self._names.keys())
        if unknown:
            raise CheckpointError(
                f"{weights.path} has {unknown[0]!r}, which this policy does not have."
            )
        with torch.no_grad():
            for name, inner in self._names.items():
                state[inner].copy_(weights.read_part(name, state[inner]))
        trained, tensors = self.optimizer.parameters, {}
        for name in saved.names:
            kind, _, inner = name.partition("/")
            # Adam's step counts are single numbers, and a name that is not trained here is refused
            # below with its name
            is_whole = kind == "step" or inner not in trained
            tensors[name] = (
                saved.read_numbers(name) if is_whole else saved.read_part(name, trained[inner])
            )
        self.optimizer.load_tensors(tensors)

    def needed(self, weights: ShardReader, saved: ShardReader) -> list[list[tuple[int, int]]]:
        """Return the bytes that `restore` reads of each file, as ranges."""
        self.sharded.scatter()
        state, trained = self._network.state_dict(), self.optimizer.parameters
        of_weights = [weights.locate(name, state[inner]) for name, inner in self._names.items()]
        of_saved = []
        for name in saved.names:
            kind, _, inner = name.partition("/")
            of_saved.append(saved.locate(name, None if kind == "step" else trained.get(inner)))
        return [of_weights, of_saved]

    def _saved_dtype(self, name: str) -> torch.dtype:
        """Return the type in which one process holds a trained parameter."""
        return self.sharded.dtypes[f"network.{name}"]

    def _byte_pieces(self, name: str, num_bytes: int) -> Iterator[RowPart]:
        """Yield this rank's part of one parameter; offsets are counted from the parameter's first."""
        parameter, dtype = self.optimizer.parameters[name], self._saved_dtype(name)
        size = dtype.itemsize
        distance = size * math.prod(parameter.shape[1:])
        for start, run, data in split_parameter(parameter, dtype, num_bytes):
            yield start * size, run * size, distance, data.numpy()


PIECE_BYTES: Final = 2 << 20
"""Bytes of one piece. A host passes a piece on once it has it from all ranks, so larger ones would
make each host of a chain later."""


class RankShard:
    """Describes and sends the shard of one rank. Owned by one event loop.

    Args:
        rank: number of the rank.
        training: the policy.
        lane: reads it, between two pieces of other work.
    """

    def __init__(self, rank: int, training: SharedTraining, lane: DeviceLane) -> None:
        self._rank, self._training, self._lane = rank, training, lane
        self._begins: dict[str, int] = {}
        self._row_bytes = 0
        self._keys: dict[str, KeyPair] = {}

    def describe_shard(self, begins: dict[str, int], row_bytes: int) -> WeightShard:
        """Return what this rank holds, on the device lane; `send_shard` sends the same later."""
        self._begins, self._row_bytes = begins, row_bytes
        digest = ShardDigest()
        # read twice, for the digest and for the sending: keeping the pieces would be a second copy
        # of the shard
        for piece in self._pieces():
            digest.add_piece(piece)
        return WeightShard(
            holder=self._rank,
            state=self._training.num_changes,
            num_bytes=digest.num_bytes,
            digest=digest.digest,
        )

    def new_link_key(self) -> str:
        """Make keys for one host; return the public one."""
        keys = make_link_keys()
        self._keys[keys.public] = keys
        return keys.public

    async def send_shard(self, link_key: str, socket: ShardSocket, state: int) -> None:
        """Send the shard. Raises: as `ShardSender.send_pieces`."""
        pieces = self._pieces()

        async def next_piece() -> ShardPiece | None:
            read = partial(self._next, pieces, state)
            is_current, piece = await self._lane.run(read, work="publish")
            if not is_current:
                raise WeightsNotGiven("the ranks have newer weights by now")
            return piece

        await ShardSender(self._keys.pop(link_key), socket, next_piece).send_pieces()

    def _pieces(self) -> Iterator[ShardPiece]:
        parts = self._training.parts(self._begins, PIECE_BYTES)
        return split_shard(parts, PIECE_BYTES, self._row_bytes)

    def _next(self, pieces: Iterator[ShardPiece], state: int) -> tuple[bool, ShardPiece | None]:
        """Return whether the weights are still those of the shard, and the next piece if so."""
        # on the lane, where no step can come in between
        if self._training.num_changes != state:
            return False, None
        return True, next(pieces, None)


_LOOK_EVERY_S: Final = 0.5


class ShardSender:
    """Sends one shard.

    Args:
        keys: those whose public one the host knows.
        socket: where the host receives it.
        next_piece: returns the next piece; None after the last one.
    """

    def __init__(
        self,
        keys: KeyPair,
        socket: ShardSocket,
        next_piece: Callable[[], Awaitable[ShardPiece | None]],
    ) -> None:
        self._keys, self._socket, self._next_piece = keys, socket, next_piece
        self._codec = Codec()
        # a question, or None at the end of the connection; bounded by the pieces on their way
        self._questions: asyncio.Queue[Frames | None] = asyncio.Queue()

    async def send_pieces(self) -> None:
        """Send all pieces, and wait until the host has closed its socket.

        Raises: HostNotReached; WeightsNotGiven if the connection is lost before; what `next_piece`
            raises.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        put = self._questions.put_nowait
        address, key = self._socket.address, self._socket.public_key
        try:
            link = DirectLink(context, address, key, self._keys, put, lambda: put(None))
        except ConnectionError as error:
            context.term()
            raise HostNotReached(f"its socket cannot be used: {error}") from error
        try:
            await self._send_all(link)
        finally:
            link.close()
            await run_in_thread(context.term)  # it waits for what is half sent

    async def _send_all(self, link: DirectLink) -> None:
        num_ahead, piece = SHARD_PIECES_AHEAD, await self._next_piece()
        began_s = time.monotonic()
        while True:
            while piece is not None and num_ahead > 0:
                link.send_frames(self._codec.encode(Kind.RESULT, 0, 0, 0, piece, "weights"))
                num_ahead -= 1
                piece = await self._next_piece()
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    question = await self._questions.get()
            except TimeoutError:
                # looked at every half second: a firewall drops packets without a word, and no event
                # would ever come
                if not link.is_up and time.monotonic() - began_s > LINK_WITHIN_S:
                    raise HostNotReached(
                        f"{link.address} does not answer within {LINK_WITHIN_S:g} s"
                    ) from None
                continue
            if question is not None:
                num_ahead += 1
            elif piece is None and link.is_up:
                return
            elif link.is_up:
                raise WeightsNotGiven(f"the connection to {link.address} was lost")
            else:
                raise HostNotReached(f"{link.address} refuses the connection")
