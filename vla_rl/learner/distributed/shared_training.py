"""A network that the ranks train together: passes begin and end, steps, saved and loaded state.

The policy is one, and a critic another; each rank makes the same calls in the same order.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from vla_rl.engines.weight_shards import RowPart, SharedParameters
from vla_rl.errors import CheckpointError
from vla_rl.learner.config import OptimizerConfig
from vla_rl.learner.distributed.parallel import ShardedModule
from vla_rl.learner.distributed.state import (
    Part,
    ShardReader,
    iterate_pieces,
    part_of,
    write_runs,
)
from vla_rl.learner.optimizer import MASTER, PolicyOptimizer, StepReport


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
        self.optimizer = PolicyOptimizer(network, config, sharded.norm_of)
        self._names = names or {name: name for name in network.state_dict()}
        self.num_changes = 0
        """Number of times that the weights were changed, by a step or by a restore."""

    def begin(self, clear: bool) -> None:
        """Gather the weights for the passes that follow; with `clear`, drop gradients first."""
        if clear:
            self.optimizer.zero_grad()
        self.sharded.gather()

    def step(self) -> StepReport:
        """Clip by the norm over all ranks, and update this rank's part of the weights."""
        self.sharded.scatter()
        self.num_changes += 1
        return self.optimizer.step()

    def pieces(self, num_bytes: int) -> Iterator[tuple[str, int, int, Tensor]]:
        """Yield this rank's parts of the trained weights: name, first index, run, bytes."""
        for name, parameter in self.optimizer.parameters.items():
            for start, run, data in iterate_pieces(parameter, self._dtype_of(name), num_bytes):
                yield name, start, run, data

    def write_pieces(self, places: SharedParameters, num_bytes: int) -> None:
        """Write this rank's parts of the trained weights into memory that engines open.

        Raises: OSError.
        """
        with Path(places.path).open("r+b") as memory:
            for name in self.optimizer.parameters:
                for start, run, distance, data in self._byte_pieces(name, num_bytes):
                    for begin in places.begins[name]:
                        write_runs(memory.fileno(), data, begin + start, run, distance)

    def parts(self, begins: Mapping[str, int], num_bytes: int) -> Iterator[RowPart]:
        """Yield this rank's parts of the trained weights in rising order of their places in a row.

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
        copied = partial(part_of, is_first_rank=is_first)
        return {
            name: copied(state[inner], self._dtype_of(inner) if inner in trained else None)
            for name, inner in self._names.items()
        }

    def copied_optimizer(self, *, is_first: bool) -> dict[str, Part]:
        """Copy this rank's part of the optimizer's state, as one process saves it."""
        copied = partial(part_of, is_first_rank=is_first)
        tensors = dict(self.optimizer.tensors())
        tensors |= {
            f"{MASTER}/{name}": tensor
            for name, tensor in self.optimizer.parameters.items()
            if self._dtype_of(name) != torch.float32
        }
        return {name: copied(tensor, None) for name, tensor in tensors.items()}

    def restore(self, weights: ShardReader, saved: ShardReader) -> None:
        """Read this rank's part of weights and optimizer. Raises: CheckpointError."""
        self.sharded.scatter()
        self.num_changes += 1
        state = self._network.state_dict()
        unknown = sorted(weights.names - self._names.keys())
        if unknown:
            raise CheckpointError(
                f"{weights.path} has {unknown[0]!r}, which this policy does not have."
            )
        with torch.no_grad():
            for name, inner in self._names.items():
                state[inner].copy_(weights.read(name, state[inner]))
        trained, tensors = self.optimizer.parameters, {}
        for name in saved.names:
            kind, _, inner = name.partition("/")
            is_whole = kind == "step" or inner not in trained
            tensors[name] = saved.numbers(name) if is_whole else saved.read(name, trained[inner])
        self.optimizer.load_tensors(tensors)

    def needed(self, weights: ShardReader, saved: ShardReader) -> list[list[tuple[int, int]]]:
        """Return the bytes that `restore` reads of each file, as ranges."""
        self.sharded.scatter()
        state, trained = self._network.state_dict(), self.optimizer.parameters
        of_weights = [weights.bytes_of(name, state[inner]) for name, inner in self._names.items()]
        of_saved = []
        for name in saved.names:
            kind, _, inner = name.partition("/")
            of_saved.append(saved.bytes_of(name, None if kind == "step" else trained.get(inner)))
        return [of_weights, of_saved]

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the type in which one process holds a trained parameter."""
        return self.sharded.dtypes[f"network.{name}"]

    def _byte_pieces(self, name: str, num_bytes: int) -> Iterator[RowPart]:
        """Yield this rank's part of one parameter; places are counted from the parameter's first."""
        parameter, dtype = self.optimizer.parameters[name], self._dtype_of(name)
        size = dtype.itemsize
        distance = size * math.prod(parameter.shape[1:])
        for start, run, data in iterate_pieces(parameter, dtype, num_bytes):
            yield start * size, run * size, distance, data.numpy()
