"""The backend of an imitator: passes of supervised learning (SFT) on a micro-batch.

`LocalImitationBackend` computes them on this process's device lane,
`distributed.ShardedImitationBackend` in learner ranks.
"""

from collections.abc import Awaitable, Callable, Sequence
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
from vla_rl.learner.ranks import LocalRank, OneRank, Pass, Ranks, compute_passes
from vla_rl.learner.scoring import LogProbs, move_choices
from vla_rl.types import Observation, derive_seed


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


class LocalImitationRank(LocalRank):
    """A rank with the whole policy, its gradients and its optimizer."""

    def __init__(
        self,
        training: Training,
        lane: DeviceLane,
        log_probs: LogProbs,
        prepare: Callable[[Sequence[Observation]], Any],
    ) -> None:
        super().__init__(lane)
        self._training, self._log_probs, self._prepare = training, log_probs, prepare

    async def gather_weights(self, clear: bool) -> None:
        """Drop gradients with `clear`; the weights are whole."""
        if clear:
            await self._lane.run(self._training.optimizer.zero_grad, work="update")

    async def imitate(self, rows: SftRows, seed: int, num_tokens: int, is_last: bool) -> Tensor:
        """Add the gradient of a micro-batch; return its part of the loss, on the device.

        Noise is drawn from torch's own state, and not from the seed.
        """
        model, log_probs = self._training.model, self._log_probs

        def backward(batch: Any) -> Tensor:
            return run_sft_backward(model, log_probs, batch, rows, num_tokens)

        return await self.compute_pass(self._prepare, rows.observations, backward, "update")


class ImitationBackend:
    """Everything that an imitator needs done with the weights that it trains, over its ranks.

    Args:
        ranks: who computes.
        config: sizes of the micro-batches.
        seed: seed of what ranks of a group draw.
    """

    def __init__(self, ranks: Ranks, config: ImitationConfig, seed: int = 0) -> None:
        self._ranks, self._size, self._seed = ranks, config.micro_batch_size, seed

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        raise NotImplementedError

    async def forward_backward(self, rows: SftRows) -> list[Tensor]:
        """Compute the gradient of the mean over all tokens to learn.

        Return each micro-batch's part of the loss.
        """
        # counted over all micro-batches before the first: the mean must not depend on how rows are
        # cut
        num_tokens, lengths = int(rows.mask.sum()), rows.num_input_tokens

        def call(
            rank: LocalImitationRank, observations: tuple[Observation, ...], part: Pass
        ) -> Awaitable[Tensor]:
            chosen = rows._replace(observations=observations).rows(part.index)
            if part.is_idle:  # a masked row adds exact zeros to every gradient
                chosen = chosen._replace(mask=torch.zeros_like(chosen.mask))
            # the word is part of the seed: another one would draw other noise for the same run
            seed = derive_seed(self._seed, "lesson", self.weight_version, int(part.index[0]))
            return rank.imitate(chosen, seed, num_tokens, part.is_last)

        return await compute_passes(
            self._ranks,
            self._ranks.deal_rows(lengths, self._size),
            lengths,
            rows.observations,
            call,
            begin=lambda rank: rank.gather_weights(True),
            least=1,
        )

    async def optim_step(self) -> StepReport:
        """Take one optimizer step, and raise the version."""
        raise NotImplementedError

    async def sum_losses(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses."""
        raise NotImplementedError

    async def fetch_weights(self) -> None:
        """Bring the weights of the model in this process up to date."""
        raise NotImplementedError

    async def snapshot(self) -> TrainingState:
        """Return all state that the next update depends on, as it is now."""
        raise NotImplementedError

    async def restore(self, state: TrainingState) -> None:
        """Continue from a snapshot."""
        raise NotImplementedError


class LocalImitationBackend(ImitationBackend):
    """`ImitationBackend` in this process: one rank without a group.

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
        self._lane = lane
        self._training = Training(model, config.optimizer, publish_to, weight_version)
        log_probs = make_sft_log_probs(model, config.label_width)
        rank = LocalImitationRank(self._training, lane, log_probs, prepare)
        super().__init__(OneRank(rank, lane), config)

    @property
    def weight_version(self) -> int:
        """Number of updates applied."""
        return self._training.weight_version

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


def _total(losses: Sequence[Tensor]) -> float:
    return float(torch.stack(list(losses)).sum())
