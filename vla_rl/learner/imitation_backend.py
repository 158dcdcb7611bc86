"""Passes of supervised learning (SFT) on a micro-batch, in a process of one or of many ranks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane, to_device
from vla_rl.engines.policy_model import TokenModel
from vla_rl.errors import ConfigError
from vla_rl.learner.backend import Training
from vla_rl.learner.predictions import LogProbs
from vla_rl.learner.ranks import LocalRank
from vla_rl.learner.scoring import move_choices
from vla_rl.types import Observation


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
