"""The rows of an update: one for each decision that was executed, and nothing else.

Legend: N decisions, T tokens a decision. Rows after the end of an episode do not exist, and the tokens of control steps
that did not run are masked, so the mask ends at the exact control step that ended the episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.types import Observation, Step, Trajectory

Advantage: TypeAlias = float | np.ndarray
"""Of one trajectory: one number for all its tokens, or float [decisions], one for each decision."""


@dataclass(frozen=True)
class Decisions:
    """Columns of N decisions.

    Attributes:
        observations: what the policy saw; frames are uint8 still.
        tokens: int64 [N, T], what it chose.
        behavior_log_prob: float32 [N, T], under the weights that acted.
        mask: bool [N, T], True where the token's control step ran.
        advantage: float32 [N, 1].
        temperature: float32 [N], at which the tokens were sampled.
        sequence: int64 [N], index of the trajectory.
        weight_version: int64 [N], of the weights that acted.
    """

    observations: tuple[Observation, ...]
    tokens: Tensor
    behavior_log_prob: Tensor
    mask: Tensor
    advantage: Tensor
    temperature: Tensor
    sequence: Tensor
    weight_version: Tensor

    def __len__(self) -> int:
        return len(self.observations)

    def rows(self, index: Tensor) -> "Decisions":
        """Some of the decisions, int64 [M], in that order."""
        return Decisions(
            observations=tuple(self.observations[row] for row in index.tolist()),
            tokens=self.tokens[index],
            behavior_log_prob=self.behavior_log_prob[index],
            mask=self.mask[index],
            advantage=self.advantage[index],
            temperature=self.temperature[index],
            sequence=self.sequence[index],
            weight_version=self.weight_version[index],
        )


def decisions_of(trajectories: Sequence[Trajectory], advantages: Sequence[Advantage]) -> Decisions:
    """Flatten trajectories, in order.

    Raises: ValueError where there is nothing to learn from, or the advantages do not fit or are not finite.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories, expected one each.")
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if not steps:
        raise ValueError("the update has no decision, expected at least one; skip an update without trajectories.")
    lengths = [len(trajectory.steps) for trajectory in trajectories]
    rows = [_row_advantages(index, *pair) for index, pair in enumerate(zip(trajectories, advantages, strict=True))]
    temperatures = [trajectory.episode.sampling.temperature for trajectory in trajectories]
    return Decisions(
        observations=tuple(step.observation for step in steps),
        tokens=_stacked([step.chunk.tokens for step in steps], "tokens", np.int64),
        behavior_log_prob=_stacked([step.chunk.log_probs for step in steps], "log_probs", np.float32),
        mask=torch.from_numpy(np.stack([_mask(step) for step in steps])),
        advantage=torch.from_numpy(np.concatenate(rows).astype(np.float32))[:, None],
        temperature=torch.from_numpy(np.repeat(np.array(temperatures, np.float32), lengths)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(trajectories)), lengths)),
        weight_version=torch.tensor([step.chunk.weight_version for step in steps]),
    )


def _mask(step: Step) -> np.ndarray:
    """bool [T]: the tokens of the first `num_executed` control steps."""
    num_tokens, horizon = len(step.chunk.tokens), len(step.chunk.actions)
    if num_tokens % horizon:
        raise ValueError(f"a chunk has {num_tokens} tokens for {horizon} control steps, expected a multiple of them.")
    return np.arange(num_tokens) < step.num_executed * (num_tokens // horizon)


def _row_advantages(index: int, trajectory: Trajectory, advantage: Advantage) -> np.ndarray:
    rows = np.asarray(advantage, dtype=np.float64)
    if rows.shape not in ((), (len(trajectory.steps),)):
        raise ValueError(
            f"the advantage of trajectory {index} is {list(rows.shape)}, expected one number or "
            f"[{len(trajectory.steps)}], one for each of its decisions."
        )
    if not np.isfinite(rows).all():
        raise ValueError(f"the advantage of trajectory {index} is not finite; look at the rewards of its group.")
    return np.broadcast_to(rows, (len(trajectory.steps),))


def _stacked(arrays: Sequence[np.ndarray], name: str, dtype: type[np.generic]) -> Tensor:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"the chunks' {name} have shapes {sorted(shapes)}, expected one; was the policy changed?")
    return torch.from_numpy(np.stack(arrays).astype(dtype, copy=False))
