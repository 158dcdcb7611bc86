"""One rank of a sharded learner: an actor in a process of its own, with its device lane.

Every rank is sent the same calls in the same order. It decides nothing: which rows it computes,
whether a step is taken and what is refused come from the learner, and whether a step is skipped
from the norm over all ranks, so that no rank can wait for another in a different collective.
"""

import os
from collections.abc import AsyncIterator
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from vla_rl.actors import Actor, actor_method
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.errors import CheckpointError
from vla_rl.learning.config import LearnerConfig
from vla_rl.learning.decisions import Decisions
from vla_rl.learning.optimizer import MASTER, PolicyOptimizer, StepReport
from vla_rl.learning.passes import PolicyPasses
from vla_rl.learning.sharded.messages import (
    Counts,
    Piece,
    Rows,
    Sums,
    pack_sums,
    unpack_counts,
    unpack_rows,
)
from vla_rl.learning.sharded.parallel import ShardedModule
from vla_rl.learning.sharded.state import (
    Entry,
    Part,
    ShardReader,
    iterate_pieces,
    part_of,
    write_parts,
)

PIECE_BYTES: Final = 16 << 20
"""Weights on their way to an engine at a time."""

LAST_RESORT: Final = timedelta(hours=2)
"""Longest wait of a collective. The learner ends all ranks seconds after one fails; this is for a
learner that itself stands still."""


class PolicySource(msgspec.Struct, frozen=True):
    """The policy that a rank builds before the weights are shared."""

    policy_class: str
    """`module:Class`, with a classmethod `load(folder)`."""

    folder: str
    dtype: str
    trained: frozenset[str]
    """Names of the parameters that are trained."""

    recomputes: bool
    """Whether activations are recomputed in the backward pass."""

    device: str
    """Type of the device; on several GPUs rank k takes number k."""


class LearnerRank(Actor):
    """A part of the rows, of the gradients and of the optimizer's state.

    Args:
        rank: number of this rank.
        source: the policy.
        config: loss, optimizer, and the number of ranks.
        meeting_point: file in which the ranks find each other.
    """

    def __init__(
        self, rank: int, source: PolicySource, config: LearnerConfig, meeting_point: str
    ) -> None:
        self._rank, self._source, self._config = rank, source, config
        self._meeting_point = meeting_point
        self._lane = DeviceLane(num_threads())
        self._staged: dict[int, dict[str, dict[str, Part]]] = {}

    async def join(self) -> None:
        """Meet the other ranks, load the policy, and keep this rank's part of it."""
        await self._lane.run(self._join)

    async def begin(self, clear: bool) -> None:
        """Gather the weights for the passes that follow; with `clear`, drop gradients first."""
        await self._lane.run(self._begin, clear)

    @actor_method(concurrent=True)
    async def accumulate(
        self, rows: Rows, counts: Counts, compare: int | None, is_last: bool
    ) -> Sums:
        """Add the gradient of a micro-batch; the last one adds the gradients of all ranks."""
        # concurrent, so that one micro-batch is prepared while the one before is computed; both
        # threads of the lane keep the order of arrival
        decisions, batch = await self._lane.prepare(self._prepare, rows)
        return await self._lane.run(
            self._accumulate, batch, decisions, unpack_counts(counts), compare, is_last
        )

    @actor_method(concurrent=True)
    async def score(self, rows: Rows) -> np.ndarray:
        """Return the log-probs of all tokens of some rows, float32 [M, T]."""
        decisions, batch = await self._lane.prepare(self._prepare, rows)
        return await self._lane.run(self._score, batch, decisions)

    async def end(self) -> None:
        """Drop the gathered weights after scoring."""
        await self._lane.run(self._sharded.scatter)

    async def step(self) -> StepReport:
        """Clip by the norm over all ranks, and update this rank's part of the weights."""
        return await self._lane.run(self._step)

    async def weights(self) -> AsyncIterator[Piece]:
        """Yield this rank's part of the trained weights, a piece at a time."""
        for name, parameter in self._optimizer.parameters.items():
            pieces = iterate_pieces(parameter, self._sharded.compute_dtype, PIECE_BYTES)
            while (found := await self._lane.run(partial(next, pieces, None))) is not None:
                start, data = found
                yield Piece(name, start, data.numpy())

    async def stage(self, number: int) -> dict[str, dict[str, Entry]]:
        """Copy this rank's part of the state; return all tensors of its two files.

        At most two copies are kept.
        """
        self._staged[number] = await self._lane.run(self._copied)
        while len(self._staged) > 2:
            del self._staged[min(self._staged)]
        return {
            file: {name: part.whole for name, part in parts.items()}
            for file, parts in self._staged[number].items()
        }

    @actor_method(concurrent=True)
    async def write(self, number: int, file: str, path: str, begins: dict[str, int]) -> None:
        """Write a staged part of one file in place. Raises: CheckpointError."""
        if number not in self._staged:
            raise CheckpointError(
                f"the state of snapshot {number} was replaced by newer ones before it was written"
            )
        parts = self._staged[number].pop(file)
        if not self._staged[number]:
            del self._staged[number]
        # on the host's thread: the next update computes meanwhile
        await self._lane.prepare(_write, Path(path), parts, begins)

    async def restore(self, policy: str, optimizer: str) -> None:
        """Read this rank's part of weights and optimizer. Raises: CheckpointError."""
        await self._lane.run(self._restore, Path(policy), Path(optimizer))

    async def on_stop(self) -> None:
        """Leave the group."""
        await self._lane.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> None:
        source, num_ranks = self._source, self._config.ranks
        device = torch.device("cpu")
        if source.device == "cuda":
            device = torch.device("cuda", self._rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if source.device == "cuda" else "gloo",
            init_method=f"file://{self._meeting_point}",
            rank=self._rank,
            world_size=num_ranks,
            timeout=LAST_RESORT,
        )
        self._model = _loaded(source, device)
        network = self._model.network
        self._inner_names = _inner_names(self._model)
        self._sharded = ShardedModule(self._model, num_ranks, self._config.shard)
        # right after sharding: while weights are gathered, a network lists other parameters
        self._optimizer = PolicyOptimizer(network, self._config.optimizer)
        self._passes = PolicyPasses(self._model, self._config, self._sharded.module)

    def _begin(self, clear: bool) -> None:
        if clear:
            self._optimizer.zero_grad()
        self._sharded.gather()

    def _prepare(self, rows: Rows) -> tuple[Decisions, Any]:
        decisions = unpack_rows(rows)
        return decisions, self._model.prepare(decisions.observations)

    def _accumulate(
        self, batch: Any, rows: Decisions, counts: Any, compare: int | None, is_last: bool
    ) -> Sums:
        self._sharded.begin_pass(is_last=is_last)
        return pack_sums(self._passes.backward(batch, rows, counts, compare))

    def _score(self, batch: Any, rows: Decisions) -> np.ndarray:
        device = next(self._model.network.parameters()).device
        with torch.no_grad():
            log_probs, _ = self._sharded.module(
                batch, rows.tokens.to(device), rows.temperature.to(device)
            )
        scores: np.ndarray = log_probs.float().cpu().numpy()
        return scores

    def _step(self) -> StepReport:
        self._sharded.scatter()
        return self._optimizer.step()

    def _copied(self) -> dict[str, dict[str, Part]]:
        state, is_first = self._model.network.state_dict(), self._rank == 0
        trained, dtype = self._optimizer.parameters, self._sharded.compute_dtype
        copied = partial(part_of, is_first_rank=is_first)
        policy = {
            name: copied(state[inner], dtype if inner in trained else None)
            for name, inner in self._inner_names.items()
        }
        optimizer = {
            name: copied(tensor, None) for name, tensor in self._optimizer.tensors().items()
        }
        if dtype != torch.float32:
            optimizer |= {
                f"{MASTER}/{name}": copied(tensor, None) for name, tensor in trained.items()
            }
        return {"policy": policy, "optimizer": optimizer}

    def _restore(self, policy: Path, optimizer: Path) -> None:
        weights, state = ShardReader(policy), self._model.network.state_dict()
        unknown = sorted(weights.names - self._inner_names.keys())
        if unknown:
            raise CheckpointError(f"{policy} has {unknown[0]!r}, which this policy does not have.")
        with torch.no_grad():
            for name, inner in self._inner_names.items():
                state[inner].copy_(weights.read(name, state[inner]))
        saved, trained = ShardReader(optimizer), self._optimizer.parameters
        tensors = {}
        for name in saved.names:
            kind, _, inner = name.partition("/")
            is_whole = kind == "step" or inner not in trained
            tensors[name] = saved.numbers(name) if is_whole else saved.read(name, trained[inner])
        self._optimizer.load_tensors(tensors)


def num_threads() -> int:
    """Return torch's threads of a rank: those of OMP_NUM_THREADS, else one."""
    return int(os.environ.get("OMP_NUM_THREADS") or 1)


def _loaded(source: PolicySource, device: torch.device) -> Any:
    module, _, name = source.policy_class.partition(":")
    model = getattr(import_module(module), name).load(Path(source.folder))
    dtype = getattr(torch, source.dtype)
    if next(model.network.parameters()).dtype != dtype:
        model.network.to(dtype)
    for name, parameter in model.network.named_parameters():
        parameter.requires_grad_(name in source.trained)
    if source.recomputes:
        model.recompute_activations()
    model.network.to(device)
    return model


def _inner_names(model: Any) -> dict[str, str]:
    """Return the network's name of each tensor of a checkpoint.

    Ask before sharding, because a sharded tensor has no address.
    """
    inner = {
        (tensor.data_ptr(), tuple(tensor.shape)): name
        for name, tensor in reversed(model.network.state_dict().items())
    }
    return {
        name: inner[tensor.data_ptr(), tuple(tensor.shape)]
        for name, tensor in model.checkpoint_tensors().items()
    }


def _write(path: Path, parts: dict[str, Part], begins: dict[str, int]) -> None:
    try:
        write_parts(path, parts, begins)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
