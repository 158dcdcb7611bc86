"""Log-probs of decisions already made, without gradient: the forward passes beside the one that learns."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.decisions import Decisions, decisions_of
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.types import Trajectory

RowsT = TypeVar("RowsT")


class Scorer:
    """Asks a policy model how likely it would have chosen what was chosen.

    Args:
        model: whose present weights are asked.
        lane: computes, one micro-batch at a time.
        micro_batch: decisions in one forward pass.
        work: under which the lane's time is counted.
    """

    def __init__(self, model: PolicyModel[Any], lane: DeviceLane, micro_batch: int, work: str = "log_probs") -> None:
        self._model, self._lane, self._micro_batch, self._work = model, lane, micro_batch, work

    async def log_probs(self, decisions: Decisions) -> Tensor:
        """float32 [N, T] on the CPU, at the temperatures at which the decisions were made."""
        parts = [decisions.rows(index) for index in torch.split(torch.arange(len(decisions)), self._micro_batch)]
        results = await in_parts(self._lane, self._prepare, self._score, parts, self._work)
        return torch.cat(results)

    def _prepare(self, rows: Decisions) -> Any:
        return self._model.prepare(rows.observations)

    def _score(self, batch: Any, rows: Decisions) -> Tensor:
        device = next(self._model.network.parameters()).device
        with torch.no_grad():
            log_probs, _ = self._model.log_probs(batch, rows.tokens.to(device), rows.temperature.to(device))
        return log_probs.float().cpu()


class Reference:
    """A frozen copy of the policy as it is now: the anchor of a KL term.

    A pipeline whose coefficient is 0 has no reference at all: neither the copy nor its forward passes are made.
    """

    def __init__(self, model: PolicyModel[Any], lane: DeviceLane, micro_batch: int) -> None:
        self._frozen = model.copy()
        self._frozen.network.requires_grad_(False)
        self._scorer = Scorer(self._frozen, lane, micro_batch, work="reference")

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """float32 [decisions, T] for each trajectory."""
        decisions = decisions_of(trajectories, [0.0] * len(trajectories))
        scores = (await self._scorer.log_probs(decisions)).numpy()
        return np.split(scores, np.cumsum([len(trajectory.steps) for trajectory in trajectories])[:-1])


async def in_parts(
    lane: DeviceLane,
    prepare: Callable[[RowsT], Any],
    compute: Callable[[Any, RowsT], Tensor],
    parts: Sequence[RowsT],
    work: str,
) -> list[Tensor]:
    """`compute(prepare(rows), rows)` for every part: prepared one ahead on the host, computed on the device lane."""
    results: list[Tensor] = []
    async with aclosing(lane.prepared_ahead(prepare, parts)) as prepared:
        async for rows, batch in prepared:
            results.append(await lane.run(compute, batch, rows, work=work))
    return results
