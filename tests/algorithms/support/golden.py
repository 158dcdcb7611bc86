"""What other projects' functions gave when they were run (tests/algorithms/golden/README.md), and
how ours is compared.
"""

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms import Aggregation, aggregation, count_denominators, policy_loss
from vla_rl.algorithms.losses import PolicyLossConfig, TokenBatch

FOLDER = Path(__file__).parents[1] / "golden"


class Golden:
    """The cases of one project."""

    def __init__(self, project: str) -> None:
        self._cases: dict[str, dict[str, Any]] = json.loads(
            (FOLDER / f"{project}.json").read_text()
        )["cases"]
        self._arrays = _arrays(project)

    @property
    def names(self) -> set[str]:
        """All cases."""
        return set(self._cases)

    def options(self, case: str) -> dict[str, Any]:
        """What the function was given beside the batch."""
        return self._cases[case]["options"]

    def output(self, case: str, name: str) -> Tensor:
        """One result, as float64 if it is a number."""
        value = torch.from_numpy(self._arrays[f"{case}/{name}"])
        return value.double() if value.is_floating_point() else value

    def batch(self, case: str) -> dict[str, Tensor]:
        """The inputs: float64, of float32 numbers if the function computed in float32."""
        prefix, rounded = self._cases[case]["batch"] + "/", "float32" in self._cases[case]["dtype"]
        inputs = {
            key.removeprefix(prefix): torch.from_numpy(value)
            for key, value in _arrays("batches").items()
            if key.startswith(prefix)
        }
        numbers = {key: value for key, value in inputs.items() if value.is_floating_point()}
        return inputs | {
            key: value.float().double() if rounded else value for key, value in numbers.items()
        }

    def tolerance(self, case: str) -> dict[str, float]:
        """How near ours has to be."""
        is_single = "float32" in self._cases[case]["dtype"]
        return {"rtol": 2e-6, "atol": 1e-6} if is_single else {"rtol": 1e-6, "atol": 1e-9}

    def assert_close(self, case: str, name: str, ours: Any, on: Tensor | None = None) -> None:
        """Ours and theirs are the same, where `on` is True."""
        theirs, found = self.output(case, name), torch.as_tensor(ours)
        found = found.double() if found.is_floating_point() else found
        if on is not None:
            theirs, found = theirs[on], found[on]
        torch.testing.assert_close(found, theirs, **self.tolerance(case))

    def assert_same_loss(
        self, case: str, loss: Callable[[Tensor], Tensor], at: Tensor, factor: float = 1.0
    ) -> None:
        """A loss and its gradient are theirs, times `factor`."""
        leaf = at.clone().requires_grad_()
        found = loss(leaf) * factor
        (gradient,) = torch.autograd.grad(found, leaf)
        self.assert_close(case, "loss", found.detach())
        self.assert_close(case, "gradient", gradient)

    def token_batch(
        self, case: str, log_prob: Tensor, advantage: str = "advantage", **fields: Any
    ) -> TokenBatch:
        """The ragged batch, with the current policy's log-probs."""
        batch = self.batch(case)
        given: dict[str, Any] = {
            "behavior_log_prob": batch["behavior_log_prob"],
            "proximal_log_prob": batch["proximal_log_prob"],
            "reference_log_prob": batch["reference_log_prob"],
            "advantage": batch[advantage],
            "mask": batch["mask"],
        }
        return TokenBatch(log_prob=log_prob, **(given | fields))

    def assert_same_policy_loss(
        self,
        case: str,
        config: PolicyLossConfig,
        mode: str,
        *,
        advantage: str = "advantage",
        length: float | None = None,
        factor: float = 1.0,
        **fields: Any,
    ) -> None:
        """A policy loss of ours on the ragged batch, reduced by `mode`, is theirs."""
        loss, reduce = policy_loss(config), aggregation(mode)

        def reduced(log_prob: Tensor) -> Tensor:
            batch = self.token_batch(case, log_prob, advantage, **fields)
            return reduce(loss(batch)[0], batch.mask, count_denominators(batch.mask, length=length))

        self.assert_same_loss(case, reduced, self.batch(case)["log_prob"], factor)


def reduced_over(
    reduce: Aggregation, losses: Tensor, mask: Tensor, length: float | None = None
) -> Tensor:
    """Losses by the tokens of a mask."""
    return reduce(losses, mask, count_denominators(mask, length=length))


def all_compared(golden: Golden, *tables: Iterable[str]) -> bool:
    """Whether every case is in one of the tables, and nothing else."""
    return golden.names == {name for table in tables for name in table}


@cache
def _arrays(project: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{project}.npz", allow_pickle=False) as arrays:
        return dict(arrays)
