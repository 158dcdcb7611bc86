"""Backend of a learner: the passes that compute a gradient, the weights that it changes.

`PolicyPasses` runs the forward and backward pass of one micro-batch, in a process of one or of many ranks.
`TrainedWeights` steps, publishes and saves: here on the device lane (`LocalWeights`), or in learner ranks
(`distributed.weights.ShardedWeights`).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vla_rl.algorithms import Denominators, aggregation
from vla_rl.algorithms.losses import Diagnostics, policy_loss
from vla_rl.engines.device_lane import DeviceLane, to_device, to_host
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.state import (
    StagedTensors,
    TrainingState,
    random_state,
    set_random_state,
)
from vla_rl.learner.config import LearnerConfig, OptimizerConfig
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.finiteness import first_nonfinite
from vla_rl.learner.optimizer import PolicyOptimizer, StepReport
from vla_rl.learner.predictions import keep_prefixes, make_loss_inputs
from vla_rl.learner.scoring import ScoringRank, move_choices


@dataclass(frozen=True)
class MicroBatchSums:
    """Sums over one micro-batch, on the device and without gradient.

    Each is a tensor of shape [].
    """

    loss: Tensor
    entropy_sum: Tensor
    diagnostics: Diagnostics
    gap_sum: Tensor
    gap_max: Tensor
    num_compared: Tensor
    tokens: Tensor
    """Version that chose each unmasked token, and its |log-ratio|: float64 [2, n]."""

    first_nonfinite: Tensor
    """Number that `finiteness.first_nonfinite` returned, int64 []."""

    def all_tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which `with_tensors` takes them."""
        own = [getattr(self, name) for name in _OWN]
        numbers = [getattr(self.diagnostics, name) for name in _DIAGNOSTICS]
        return [*own, *numbers, *self.diagnostics.extra_sums.values()]

    def with_tensors(self, tensors: Iterator[Tensor]) -> "MicroBatchSums":
        """Return the same sums with the next of these tensors."""
        own = {name: next(tensors) for name in _OWN}
        numbers = {name: next(tensors) for name in _DIAGNOSTICS}
        extra = {name: next(tensors) for name in self.diagnostics.extra_sums}
        return replace(self, diagnostics=Diagnostics(**numbers, extra_sums=extra), **own)

    def in_float64(self) -> "MicroBatchSums":
        """Return the same sums in float64, in which those of several ranks are added up."""
        tensors = self.all_tensors()
        return self.with_tensors(
            each.double() if each.is_floating_point() else each for each in tensors
        )


_OWN = tuple(each.name for each in fields(MicroBatchSums) if each.name != "diagnostics")
_DIAGNOSTICS = tuple(each.name for each in fields(Diagnostics) if each.name != "extra_sums")


def on_host(
    sums: Sequence[MicroBatchSums], *others: Tensor
) -> tuple[list[MicroBatchSums], list[Tensor]]:
    """Copy the sums of micro-batches, and other tensors, to the host in one copy."""
    found = iter(to_host(*(each for part in sums for each in part.all_tensors()), *others))
    return [part.with_tensors(found) for part in sums], list(found)


class WeightSink(Protocol):
    """A receiver of the learner's weights that acts with them, such as a `TorchEngine`."""

    @property
    def network(self) -> nn.Module:
        """The weights that act; the learner's own network if they are shared."""
        ...

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Take over weights and version, on the device lane."""
        ...


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

    def optim_step(self, publish: bool, grad_norm: float | None = None) -> StepReport:
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
            self.publish_weights()
        return report

    def publish_unchanged(self) -> None:
        """Publish the same weights as a new version, after an update that trained nothing.

        The optimizer does not step.
        """
        self.weight_version += 1
        self.publish_weights()

    def publish_weights(self) -> None:
        """Send the current weights and their version to every engine that acts with them."""
        for sink in self._sinks:
            sink.apply_weights(self.model.network, self.weight_version)

    def snapshot(self) -> TrainingState:
        """Copy all state to the CPU."""
        # copies and not views: the next optimizer step changes parameters and moments in place,
        # while the checkpoint is still being written
        return TrainingState(
            weight_version=self.weight_version,
            policy=_copied(self.model.checkpoint_tensors()),
            optimizer=_copied(self.optimizer.state_tensors()),
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
        self.publish_weights()


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


class PolicyPasses:
    """Passes of one micro-batch through a policy, on the device lane.

    Args:
        model: the policy.
        config: loss, aggregation and entropy bonus.
        owner: module whose methods call the model's; None for the model itself.
    """

    def __init__(self, model: TokenModel[Any], config: LearnerConfig, owner: Any = None) -> None:
        self._model = model
        self._compute = make_loss_inputs(model, model if owner is None else owner, config)
        self._loss, self._entropy_coef = policy_loss(config.loss), config.entropy_coef
        self._aggregate = aggregation(config.aggregation)

    def backward(
        self, batch: Any, rows: Decisions, counts: Denominators, compare: int | None
    ) -> MicroBatchSums:
        """Add the gradient of a micro-batch.

        Args:
            batch: prepared observations.
            rows: the rows, on the host.
            counts: divisors of the whole mini-batch, for these rows.
            compare: version whose log-probs these weights should reproduce; None for none.
        """
        device = next(self._model.network.parameters()).device
        # asked on the host: on a GPU, a selection by a mask waits for its number of True
        unmasked = to_device(rows.mask.flatten().nonzero()[:, 0], device)
        log_prob, entropy, predicted = self._compute(
            batch, *move_choices(self._model, rows.tokens, rows.temperature)
        )
        if not self._entropy_coef:
            # a graph that no backward pass goes through keeps all logits that its checkpoints
            # recompute: 16 GB instead of 1.5 for 8,192 positions of 152,000 tokens
            entropy = entropy.detach()
        rows = rows.on_device(device)
        # at the first micro-batch and not as a wrong curve after hours: the loss would compute with
        # such numbers without an error
        if log_prob.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{type(self._model).__name__}.log_probs gave {log_prob.dtype}, expected "
                "torch.float32: rounded to 8 bits a ratio of 1.0004 is 1. Call .float() on the "
                "logits before log_softmax."
            )
        losses, diagnostics = self._loss(replace(rows.token_batch(log_prob), **predicted))
        if self._entropy_coef:
            losses = losses - self._entropy_coef * entropy
        counts = dataclasses.replace(
            counts, sequence_tokens=to_device(counts.sequence_tokens, device)
        )
        loss = self._aggregate(losses, rows.mask, counts)
        torch.autograd.backward(loss)
        is_same = (
            torch.zeros_like(rows.mask)
            if compare is None
            else rows.mask & (rows.weight_version == compare)
        )
        # measured in every update, because acting and learning may come apart later: compiled
        # blocks round elsewhere when they act, by 0.041 in the mean
        distance = torch.where(rows.mask, (log_prob - rows.behavior_log_prob).detach().abs(), 0.0)
        gap = torch.where(is_same, distance, 0.0)
        versions = rows.weight_version.double().expand_as(distance)
        return MicroBatchSums(
            loss=loss.detach(),
            entropy_sum=torch.where(rows.mask, entropy.detach(), 0.0).sum(),
            diagnostics=diagnostics,
            gap_sum=gap.sum(),
            gap_max=gap.max(),
            num_compared=is_same.sum(),
            tokens=torch.stack([versions, distance.double()]).flatten(1)[:, unmasked],
            first_nonfinite=first_nonfinite(log_prob, entropy, rows.mask),
        )


class TrainedWeights(Protocol):
    """The weights that a learner or an imitator trains: their optimizer, version and engines."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        ...

    async def read_sums(self, sums: list[MicroBatchSums]) -> list[MicroBatchSums]:
        """Return the sums of a mini-batch on the host."""
        ...

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses of a mini-batch."""
        ...

    async def optim_step(self, publish: bool) -> StepReport:
        """Take one optimizer step; with `publish`, raise the version and publish the weights."""
        ...

    async def publish_unchanged(self) -> None:
        """Publish the same weights as a new version."""
        ...

    async def fetch_weights(self) -> None:
        """Bring the weights of the model in this process up to date."""
        ...

    async def snapshot(self) -> TrainingState:
        """Return all state that the next update depends on, as it is now."""
        ...

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it."""
        ...


class LocalPolicyRank(ScoringRank):
    """A rank with the whole policy, its gradients and its optimizer."""

    def __init__(self, training: Training, lane: DeviceLane, config: LearnerConfig) -> None:
        super().__init__(training.model, lane, "proximal")
        self._training, self._passes = training, PolicyPasses(training.model, config)
        keep_prefixes(training.model, config)

    async def gather_weights(self, clear: bool) -> None:
        """Drop gradients with `clear`; the weights are whole."""
        if clear:
            await self._lane.run(self._training.optimizer.zero_grad, work="update")

    async def drop_prefixes(self) -> int:
        """Free what the policy keeps of the observations of an update; return its bytes."""
        policy: Any = self._model
        num_bytes: int = await self._lane.run(policy.drop_prefixes, work="update")
        return num_bytes

    async def forward_backward(
        self, rows: Decisions, counts: Denominators, compare: int | None, is_last: bool
    ) -> MicroBatchSums:
        """Add the gradient of a micro-batch."""
        backward = partial(self._passes.backward, rows=rows, counts=counts, compare=compare)
        return await self.compute_pass(self._model.prepare, rows.observations, backward, "update")


class LocalWeights:
    """`TrainedWeights` of a process alone, on its device lane."""

    def __init__(self, training: Training, lane: DeviceLane) -> None:
        self._training, self._lane = training, lane
        self._grad_norm: float | None = None

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

    async def read_sums(self, sums: list[MicroBatchSums]) -> list[MicroBatchSums]:
        """Copy the sums to the host in one copy."""
        return await self._lane.run(self._read, sums, work="update")

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Read the sum of the losses from the device."""
        return await self._lane.run(_total, losses, work="update")

    async def optim_step(self, publish: bool) -> StepReport:
        """Take one optimizer step."""
        grad_norm, self._grad_norm = self._grad_norm, None
        return await self._lane.run(self._training.optim_step, publish, grad_norm, work="update")

    async def publish_unchanged(self) -> None:
        """Publish the same weights as a new version."""
        await self._lane.run(self._training.publish_unchanged, work="update")

    async def fetch_weights(self) -> None:
        """Do nothing: the model in this process is the one that is trained."""

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on."""
        return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it."""
        await self._lane.run(self._training.restore, state, work="checkpoint")

    def _read(self, sums: list[MicroBatchSums]) -> list[MicroBatchSums]:
        """Copy the sums to the host, and with them the norm that the step needs there."""
        found, (grad_norm,) = on_host(sums, self._training.optimizer.measure_gradient())
        self._grad_norm = float(grad_norm)
        return found


def _total(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).sum())
