"""Operations of every learner on a policy model: optimizer steps, publication of weights, saving
and loading of all state.

All methods here run on the device lane. A state is a snapshot, not a view: the next step does not
change it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import CheckpointError
from vla_rl.learner.config import OptimizerConfig
from vla_rl.learner.optimizer import PolicyOptimizer, StepReport
from vla_rl.types import SOLE_MEMBER, Roster


class WeightSink(Protocol):
    """A receiver of the learner's weights that acts with them, such as a `TorchEngine`."""

    @property
    def network(self) -> nn.Module:
        """The weights that act; the learner's own network if they are shared."""
        ...

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Take over weights and version, on the device lane."""
        ...


@runtime_checkable
class StagedTensors(Protocol):
    """Tensors of one file, copied where they are computed, in other processes."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def write_file(self, path: Path) -> None:
        """Write the safetensors file. Blocks: call it in a thread. Raises: CheckpointError."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """All state that the next update depends on: plain tensors on the CPU, by name, or staged by
    ranks.
    """

    weight_version: int
    policy: "Mapping[str, Tensor] | StagedTensors"
    optimizer: "Mapping[str, Tensor] | StagedTensors"
    rng: Mapping[str, Tensor]
    policy_files: Mapping[str, bytes]
    """Small files that make the policy's tensors a checkpoint of their own, such as its
    `config.json`."""

    folder: Path | None = None
    """Folder of the checkpoint that it was read from, from which ranks read their own parts."""


@dataclass(frozen=True)
class TeamState:
    """The states of all policies that learn in one run."""

    members: Mapping[str, TrainingState]
    """States by member name; at least one, all at one weight version."""

    critic: "Mapping[str, Tensor] | StagedTensors" = field(default_factory=dict)
    """State of the critics, if there are any."""

    critic_file: Path | None = None
    """File that it was read from, from which ranks read their own parts."""

    @classmethod
    def of_one(cls, state: TrainingState) -> "TeamState":
        """Return the state of a team of one, whose policy acts for all agents."""
        return cls({SOLE_MEMBER: state})

    @property
    def only(self) -> TrainingState:
        """State of the only policy. Raises: CheckpointError if there are several."""
        if len(self.members) > 1:
            raise CheckpointError(
                f"the checkpoint has {self.roster}, expected one policy; "
                "resume with the recipe and settings that made it."
            )
        return next(iter(self.members.values()))

    @property
    def roster(self) -> Roster:
        """Names of the members."""
        return Roster(self.members)

    @property
    def weight_version(self) -> int:
        """Number of updates, counting for every agent also those in which it did not learn."""
        return min(state.weight_version for state in self.members.values())


class Training:
    """A policy model, its optimizer and the version of its weights."""

    def __init__(
        self,
        model: TokenModel[Any],
        config: OptimizerConfig,
        publish_to: Sequence[WeightSink],
        weight_version: int,
    ) -> None:
        self.model = model
        self.optimizer = PolicyOptimizer(model.network, config)
        self.weight_version = weight_version
        self._sinks = tuple(publish_to)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.model.network.parameters()).device

    def step(self, publish: bool, grad_norm: float | None = None) -> StepReport:
        """Take one optimizer step; with `publish`, raise the version and publish the weights in the
        same piece of work.

        A skipped step is published too, with the weights of the version before, so that components
        that wait for a version go on. `grad_norm` is that of `PolicyOptimizer.step`.
        """
        report = self.optimizer.step(grad_norm)
        # in the same piece of work: a batch between step and hand-over would act with new weights
        # under the old version
        if publish:
            self.weight_version += 1
            self.publish()
        return report

    def stand_still(self) -> None:
        """Publish the same weights as a new version, after an update that taught nothing.

        The optimizer does not step.
        """
        self.weight_version += 1
        self.publish()

    def publish(self) -> None:
        """Give the current weights and their version to every engine that acts with them."""
        for sink in self._sinks:
            sink.adopt(self.model.network, self.weight_version)

    def snapshot(self) -> TrainingState:
        """Copy all state to the CPU."""
        return TrainingState(
            weight_version=self.weight_version,
            policy=_copied(self.model.checkpoint_tensors()),
            optimizer=_copied(self.optimizer.tensors()),
            rng=random_state(),
            policy_files=dict(self.model.checkpoint_files()),
        )

    def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it.

        Raises: CheckpointError if it is not of this policy.
        """
        if isinstance(state.policy, StagedTensors) or isinstance(state.optimizer, StagedTensors):
            raise CheckpointError("the state is staged by ranks; save it, and load the checkpoint.")
        self.model.load_checkpoint_tensors(state.policy)
        self.optimizer.load_tensors(state.optimizer)
        set_random_state(state.rng)
        self.weight_version = state.weight_version
        self.publish()


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def random_state() -> dict[str, Tensor]:
    # NumPy's legacy global generator, because libraries still draw from it
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state().clone(),
        "numpy_keys": torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
        "numpy_rest": torch.tensor(
            [float(position), float(has_gauss), float(cached)], dtype=torch.float64
        ),
    }
    for index in range(torch.cuda.device_count()):
        state[f"cuda_{index}"] = torch.cuda.get_rng_state(index).clone()
    return state


def set_random_state(state: Mapping[str, Tensor]) -> None:
    try:
        position, has_gauss, cached = state["numpy_rest"].tolist()
        keys = state["numpy_keys"].numpy().astype(np.uint32)
        torch.set_rng_state(state["torch"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"the saved random state cannot be restored: {error!r}") from error
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    for index in range(torch.cuda.device_count()):
        if f"cuda_{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda_{index}"], index)
