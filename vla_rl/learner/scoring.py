"""Log-probs of recorded decisions, without gradient: the forward passes in addition to those of the
update.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane, to_device, to_host
from vla_rl.engines.policy_model import LanguageModel, TokenModel
from vla_rl.learner.config import MicroBatchSize
from vla_rl.learner.decisions import Decisions, decisions_of
from vla_rl.learner.micro_batches import micro_batches
from vla_rl.learner.sound_numbers import require_log_probs
from vla_rl.types import Trajectory

RowsT = TypeVar("RowsT")
ResultT = TypeVar("ResultT")

REFERENCES: Final = "the reference's"
"""Owner of a reference's log-probs, in errors."""

DISAGREES: Final = (
    "look for NaN or infinity in its weights, and whether it may choose the same "
    "tokens as the engine"
)


def place_choices(model: TokenModel[Any], *columns: Tensor) -> tuple[Tensor, ...]:
    """Copy tokens and temperatures to where a model's `log_probs` takes them: its device, but for a
    language model, which lays out rows by the lengths of replies, and asks for them on the host.
    """
    if isinstance(model, LanguageModel):
        return columns
    device = next(model.network.parameters()).device
    return tuple(to_device(column, device) for column in columns)


class Scorer:
    """Computes the log-probs that a policy model gives to recorded choices.

    Args:
        model: the model, used with its current weights.
        lane: runs the model, one micro-batch at a time.
        size: limits of the micro-batches.
        work: kind of work under which the lane counts the time.
        whose: name of the model in errors.
    """

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        size: MicroBatchSize,
        work: str = "log_probs",
        whose: str = "the learner's",
    ) -> None:
        self._model, self._lane, self._size, self._work, self._whose = (
            model,
            lane,
            size,
            work,
            whose,
        )

    async def log_probs(self, decisions: Decisions) -> Tensor:
        """Score every token: float32 [N, T] on the CPU, 0 in the padding, at the temperatures of
        the decisions.

        Raises: ValueError, naming episode and decision, for a number that cannot be a log-prob.
        """
        indices = micro_batches(decisions.num_read, self._size)
        parts = [decisions.rows(index) for index in indices]
        found = await compute_in_parts(self._lane, self._prepare, self._score, parts, self._work)
        results = await self._lane.run(to_host, *found, work=self._work)
        scores = torch.zeros(decisions.mask.shape)
        for index, result in zip(indices, results, strict=True):
            scores[index, : result.shape[1]] = result
        require_log_probs(decisions, scores, self._whose, DISAGREES)
        return scores

    def _prepare(self, rows: Decisions) -> Any:
        return self._model.prepare(rows.observations)

    def _score(self, batch: Any, rows: Decisions) -> Tensor:
        with torch.no_grad():
            log_probs, _ = self._model.log_probs(
                batch, *place_choices(self._model, rows.tokens, rows.temperature)
            )
        return log_probs.float()


class PolicyReference:
    """A frozen policy, for a KL term.

    A pipeline whose coefficient is 0 has no reference: neither the copy nor its forward passes are
    made.

    Args:
        log_probs: scores decisions under the frozen weights.
    """

    def __init__(self, log_probs: Callable[[Decisions], Awaitable[Tensor]]) -> None:
        self._log_probs = log_probs

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        """Compute the log-probs, for each trajectory float32 [T] of each decision."""
        decisions = decisions_of(trajectories, [0.0] * len(trajectories))
        scores = iter(decisions.split_by_decision(await self._log_probs(decisions)))
        return [[next(scores) for _ in trajectory.steps] for trajectory in trajectories]


class Reference(PolicyReference):
    """A frozen copy of the current policy, which scores in this process."""

    def __init__(
        self,
        model: TokenModel[Any],
        lane: DeviceLane,
        micro_batch: int,
        micro_batch_tokens: int | None = None,
    ) -> None:
        frozen = model.copy()
        frozen.network.requires_grad_(False)
        size = MicroBatchSize(micro_batch, micro_batch_tokens)
        super().__init__(Scorer(frozen, lane, size, "reference", REFERENCES).log_probs)


async def compute_in_parts(
    lane: DeviceLane,
    prepare: Callable[[RowsT], Any],
    compute: Callable[[Any, RowsT], ResultT],
    parts: Sequence[RowsT],
    work: str,
) -> list[ResultT]:
    """Compute `compute(prepare(rows), rows)` for every part: prepared one ahead on the host,
    computed on the device lane."""
    results: list[ResultT] = []
    async with aclosing(lane.prepared_ahead(prepare, parts)) as prepared:
        async for rows, batch in prepared:
            results.append(await lane.run(compute, batch, rows, work=work))
    return results
