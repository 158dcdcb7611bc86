"""Metrics of an update, summed on the device by micro-batch and read once for each optimizer step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from vla_rl.algorithms.losses import Diagnostics
from vla_rl.engines.device_lane import to_host
from vla_rl.learner.optimizer import StepReport


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

    first_unsound: Tensor
    """Number that `sound_numbers.first_unsound` returned, int64 []."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors, in the order in which `with_tensors` takes them."""
        own = [getattr(self, name) for name in _OWN]
        told = [getattr(self.diagnostics, name) for name in _DIAGNOSTICS]
        return [*own, *told, *self.diagnostics.extra_sums.values()]

    def with_tensors(self, tensors: Iterator[Tensor]) -> "MicroBatchSums":
        """Return the same sums with the next of these tensors."""
        own = {name: next(tensors) for name in _OWN}
        told = {name: next(tensors) for name in _DIAGNOSTICS}
        extra = {name: next(tensors) for name in self.diagnostics.extra_sums}
        return replace(self, diagnostics=Diagnostics(**told, extra_sums=extra), **own)


_OWN = tuple(each.name for each in fields(MicroBatchSums) if each.name != "diagnostics")
_DIAGNOSTICS = tuple(each.name for each in fields(Diagnostics) if each.name != "extra_sums")


def on_host(
    sums: Sequence[MicroBatchSums], *others: Tensor
) -> tuple[list[MicroBatchSums], list[Tensor]]:
    """Copy the sums of micro-batches, and other tensors, to the host in one copy."""
    found = iter(to_host(*(each for part in sums for each in part.tensors()), *others))
    return [part.with_tensors(found) for part in sums], list(found)


def update_metrics(
    sums: Sequence[MicroBatchSums], reports: Sequence[StepReport], weight_version: int
) -> dict[str, float]:
    """Return the metrics by path.

    Args:
        sums: sums of all micro-batches of the update.
        reports: reports of its optimizer steps; none if the update taught nothing, which
            `update/taught` shows.
        weight_version: the learner's version before the update.

    Returns: `update/loss` is the mean over the optimizer steps; means over tokens are over those of
    the rows that were computed. `update/log_prob_gap_mean` and
    `_max`, |learner's log-prob - engine's| of the same tokens under the same weights, are present
    only if the newest version made some of the decisions. `update/log_ratio_abs/staleness_K` is the
    mean |log-ratio| over the tokens of decisions K updates old, over all steps.
    """
    if not reports:
        return {"update/taught": 0.0}
    diagnostics = reduce(add, (part.diagnostics for part in sums))
    num_tokens = max(float(diagnostics.num_tokens), 1.0)
    metrics = {
        "update/taught": 1.0,
        "update/loss": float(torch.stack([part.loss for part in sums]).sum()) / len(reports),
        "update/entropy": float(torch.stack([part.entropy_sum for part in sums]).sum())
        / num_tokens,
        **{f"update/{name}": value for name, value in diagnostics.metrics().items()},
        "update/grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "update/lr": reports[-1].lr,
        "update/steps": float(len(reports)),
        "update/skipped_steps": float(sum(report.is_skipped for report in reports)),
        "update/tokens": float(diagnostics.num_tokens),
    }
    metrics |= _ratios_by_staleness(
        torch.cat([part.tokens for part in sums], dim=1), weight_version
    )
    gap = mean_gap(sums)
    if gap is not None:
        metrics["update/log_prob_gap_mean"] = gap
        metrics["update/log_prob_gap_max"] = float(
            torch.stack([part.gap_max for part in sums]).max()
        )
    return metrics


def staleness_metrics(staleness: Tensor) -> dict[str, float]:
    """Summarise the staleness of each token, int64 [n].

    It is the learner's version minus the version that chose the token.
    """
    return {
        "update/staleness_mean": float(staleness.float().mean()),
        "update/staleness_max": float(staleness.max()),
    }


def mean_gap(sums: Sequence[MicroBatchSums]) -> float | None:
    """Return the mean |learner's log-prob - engine's| over tokens chosen by the same weights.

    None if there are none.
    """
    num_compared = int(torch.stack([part.num_compared for part in sums]).sum())
    return (
        float(torch.stack([part.gap_sum for part in sums]).sum()) / num_compared
        if num_compared
        else None
    )


def _ratios_by_staleness(tokens: Tensor, weight_version: int) -> dict[str, float]:
    versions, sizes = tokens
    metrics = {}
    for version in versions.unique().tolist():
        chosen = versions == version
        name = f"update/log_ratio_abs/staleness_{weight_version - int(version)}"
        metrics[name] = float(sizes[chosen].mean())
    return metrics
