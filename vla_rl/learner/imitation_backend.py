"""The backend of an imitator: passes of supervised learning (SFT) on a micro-batch.

`LocalImitationBackend` computes them on this process's device lane,
`distributed.ShardedImitationBackend` in learner ranks.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane, to_device
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError
from vla_rl.learner.backend import Training, WeightSink
from vla_rl.learner.checkpoint.state import TrainingState
from vla_rl.learner.config import ImitationConfig
from vla_rl.learner.optimizer import StepReport
from vla_rl.learner.plan import micro_batches
from vla_rl.learner.scoring import move_choices
from vla_rl.types import Observation

LogProbs = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]


@runtime_checkable
class NearTokens(Protocol):
    """A policy whose neighbouring tokens mean nearly the same."""

    def near_log_probs(self, batch: Any, tokens: Tensor, width: float) -> Tensor:
        """Return the mean log-prob, float32 [B, T], of the tokens around each token, weighed by a
        Gaussian of `width` tokens.
        """
        ...


def make_sft_log_probs(model: TokenModel[Any], width: float) -> LogProbs:
    """Return what computes the log-probs to raise: those of tokens, or around them.

    Raises: ConfigError if the policy's tokens have no neighbours.
    """
    if width == 0.0:
        return model.log_probs
    if not isinstance(model, NearTokens):
        raise ConfigError(
            f"imitation.label_width is {width}, but the tokens of {type(model).__name__} have no "
            "neighbours, expected 0 for this policy"
        )
    near = model.near_log_probs

    def log_probs(batch: Any, tokens: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        # the entropy is not computed: nothing of supervised learning reads it
        found = near(batch, tokens, width)
        return found, torch.zeros_like(found)

    return log_probs


class Preparation(msgspec.Struct, frozen=True):
    """A function of another module that prepares training batches on the ranks."""

    factory: str
    """`module:function`: takes the policy and `settings`, and returns a function of observations and
    a seed, from which it draws."""

    settings: dict[str, Any]


class SftRows(NamedTuple):
    """Observations with the tokens to learn."""

    observations: tuple[Observation, ...]

    tokens: Tensor
    """int64 [N, T], or float32 of continuous actions."""

    mask: Tensor
    """bool [N, T], True for a token to learn."""

    lengths: Tensor
    """int64 [N], number of tokens of each row."""

    num_input_tokens: Tensor
    """int64 [N], number of tokens that a pass reads for each row."""

    def rows(self, index: Tensor) -> "SftRows":
        """Return some of the rows, as wide as the longest of them."""
        width = int(self.lengths[index].max())
        observations = tuple(self.observations[row] for row in index.tolist())
        tokens, mask = self.tokens[index, :width], self.mask[index, :width]
        return SftRows(
            observations, tokens, mask, self.lengths[index], self.num_input_tokens[index]
        )


class ImitationBackend(Protocol):
    """Everything that an imitator needs done with the weights that it trains."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        ...

    async def forward_backward(self, rows: SftRows) -> list[Tensor]:
        """Compute the gradient of the mean over all tokens to learn.

        Return each micro-batch's part of the loss.
        """
        ...

    async def optim_step(self) -> StepReport:
        """Take one optimizer step, and raise the version."""
        ...

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses."""
        ...

    async def fetch_weights(self) -> None:
        """Bring the weights of the model in this process up to date."""
        ...

    async def snapshot(self) -> TrainingState:
        """Return all state that the next update depends on, as it is now."""
        ...

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot."""
        ...


def run_sft_backward(
    model: TokenModel[Any], log_probs: LogProbs, batch: Any, rows: SftRows, num_tokens: int
) -> Tensor:
    """Add the gradient of a micro-batch; return its part of the loss.

    Args:
        model: the policy.
        log_probs: its method, or a module that calls it.
        batch: prepared observations.
        rows: the rows, on the host.
        num_tokens: tokens to learn of all micro-batches.
    """
    mask = to_device(rows.mask, next(model.network.parameters()).device)
    # entropies are let go at once: their graph would keep all logits (see `PolicyPasses`)
    log_prob = log_probs(batch, *move_choices(model, rows.tokens, torch.ones(len(rows.tokens))))[0]
    loss = -torch.where(mask, log_prob, 0.0).sum() / num_tokens
    torch.autograd.backward(loss)
    return loss.detach()


class LocalImitationBackend:
    """The passes of an imitator in this process, one after another on the device lane.

    Args: those of `Imitator`.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        config: ImitationConfig,
        publish_to: Sequence[WeightSink],
        weight_version: int,
        prepare: Callable[[Sequence[Observation]], Any],
    ) -> None:
        self._model, self._lane, self._config, self._prepare = model, lane, config, prepare
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        self._log_probs = make_sft_log_probs(model, config.label_width)

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

    async def forward_backward(self, rows: SftRows) -> list[Tensor]:
        """Compute the gradient, in micro-batches."""
        await self._lane.run(self._training.optimizer.zero_grad, work="update")
        indices = micro_batches(rows.num_input_tokens, self._config.micro_batch_size)
        parts = [rows.rows(index) for index in indices]
        # counted over all micro-batches before the first: the mean must not depend on how rows are
        # cut
        num_tokens, losses = int(rows.mask.sum()), []
        async with aclosing(self._lane.prepare_ahead(self._prepared, parts)) as prepared:
            async for part, batch in prepared:
                arguments = (self._model, self._log_probs, batch, part, num_tokens)
                losses.append(await self._lane.run(run_sft_backward, *arguments, work="update"))
        return losses

    async def optim_step(self) -> StepReport:
        """Take one optimizer step, and publish."""
        return await self._lane.run(self._training.optim_step, True, work="update")

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Read the sum of the losses from the device."""
        return await self._lane.run(_total, losses, work="update")

    async def fetch_weights(self) -> None:
        """Do nothing: the model in this process is the one that is trained."""

    async def snapshot(self) -> TrainingState:
        """Copy all state that the next update depends on."""
        return await self._lane.run(self._training.snapshot, work="checkpoint")

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot, and publish it."""
        await self._lane.run(self._training.restore, state, work="checkpoint")

    def _prepared(self, part: SftRows) -> Any:
        return self._prepare(part.observations)


def _total(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).sum())
