"""Inputs of a policy loss under the current weights: log-probs, predictions of a flow policy, kept prefixes.

    loss of a ratio                       log_probs(batch, tokens, temperatures)
    loss of predictions, exact KL, stop   predict(batch, tokens, temperatures, predicts): log-probs and predictions

Both are methods of the policy, or of a module that calls it for a rank.

Rows are read once in every epoch. A flow policy whose prefix (images and prompt) is not trained computes
the same for them each time, so that it may keep it for the update: `FlowPolicy.keep_prefixes`.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor

from vla_rl.algorithms.losses import Diagnostics, KlLossConfig
from vla_rl.engines.policy_model import Predictions
from vla_rl.errors import ConfigError
from vla_rl.learner.config import LearnerConfig
from vla_rl.learner.ranks import Ranks

GIB: Final = 2**30

LogProbs: TypeAlias = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`TokenModel.log_probs`, or a module that calls it."""

PREDICTED: Final = tuple(
    name for name in Predictions._fields if name not in ("log_probs", "entropy")
)
"""Fields of `Predictions` that are fields of a `TokenBatch` too."""


class LossInputs(NamedTuple):
    """Inputs of a loss that depend on the current weights.

    Attributes:
        log_prob, entropy: float [B, T].
        predicted: further fields of a `TokenBatch`, by name.
    """

    log_prob: Tensor
    entropy: Tensor
    predicted: dict[str, Any]


def require_suitable_loss(model: Any, config: LearnerConfig) -> None:
    """Raise ConfigError if a policy cannot be trained by a loss."""
    loss, name = config.loss, type(model).__name__
    if loss.needs_predictions and not hasattr(model, "predict"):
        setting = "kl.estimator is 'exact'" if loss.kl.is_exact else f"the loss is {loss.name!r}"
        raise ConfigError(
            f"{setting}, which compares predictions of a flow policy, but {name} has none; take a flow "
            "policy, or another loss and estimator"
        )
    has_ratio = loss.declared is None or not loss.declared.needs_predictions
    if has_ratio and not getattr(model, "has_likelihood", True):
        raise ConfigError(
            f"the loss {loss.name!r} needs the likelihood of a decision, but {name} chooses without noise: "
            "its noise level is 0. Set the noise level above 0, or take the loss nft"
        )


def make_loss_inputs(
    model: Any, owner: Any, config: LearnerConfig
) -> Callable[[Any, Tensor, Tensor], LossInputs]:
    """Return the function of (batch, tokens, temperatures) that computes what the loss needs.

    Args:
        model: the policy.
        owner: the policy, or a module whose methods of the same names call it.
        config: loss and stop.
    """
    stops_exactly = config.stop_kl is not None and hasattr(model, "predict")
    if not (config.loss.needs_predictions or stops_exactly):

        def score(*choices: Any) -> LossInputs:
            log_probs, entropy = owner.log_probs(*choices)
            return LossInputs(log_probs, entropy, {})

        return score
    predicts = config.loss.predicted

    def predict(*choices: Any) -> LossInputs:
        found = Predictions(*owner.predict(*choices, predicts))
        predicted = {name: getattr(found, name) for name in PREDICTED}
        return LossInputs(found.log_probs, found.entropy, predicted)

    return predict


def choose_reference_scores(owner: Any, kl: KlLossConfig | None) -> LogProbs:
    """Return what a reference is scored by: its log-probs, or its predictions for the exact KL."""
    if kl is None or not kl.is_exact:
        log_probs: LogProbs = owner.log_probs
        return log_probs

    def predict(batch: Any, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        found = Predictions(*owner.predict(batch, tokens, temperatures, "next_state"))
        return found.prediction, found.entropy

    return predict


def exceeds_kl(diagnostics: Sequence[Diagnostics], limit: float | None) -> bool:
    """Return whether a mini-batch's mean KL from the weights that acted is above a limit.

    It is exact if the loss was given predictions, else estimated by k3.
    """
    if limit is None:
        return False
    metrics = reduce(add, diagnostics).metrics()
    return metrics.get("behavior_kl", metrics.get("kl_k3", 0.0)) > limit


def count_prefix_bytes(model: Any, config: LearnerConfig) -> int:
    """Return the bytes that prefixes may take on each rank; 0 if none are kept."""
    # an engine may share the network of a learner with one epoch, and has to compute as before
    is_read_again = config.epochs > 1
    if not (is_read_again and getattr(model, "has_frozen_prefix", False)):
        return 0
    return round(config.prefix_cache_gib * GIB)


def keep_prefixes(model: Any, config: LearnerConfig) -> None:
    """Let a policy keep prefixes, if rows are read again and its prefix is frozen."""
    num_bytes = count_prefix_bytes(model, config)
    if num_bytes:
        model.keep_prefixes(num_bytes)


async def drop_prefixes(ranks: Ranks, config: LearnerConfig) -> dict[str, float]:
    """Free the prefixes that every rank keeps, at the end of an update; return the metric of the largest."""

    async def drop(rank: Any, _: None) -> int:
        num_bytes: int = await rank.drop_prefixes()
        return num_bytes

    found = await ranks.compute(drop, [None] * config.row_groups)
    return {"update/kept_prefix_gib": max(found) / GIB}
