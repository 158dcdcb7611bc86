"""The rows of an update: one for each decision that was executed, and nothing else.

Legend: N decisions, T tokens a decision. Rows after the end of an episode do not exist, and the tokens of control steps
that did not run are masked, so the mask ends at the exact control step that ended the episode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.types import Observation, Step, Trajectory

Advantage: TypeAlias = float | np.ndarray
"""Of one trajectory: one number for all its tokens, float [decisions], or float [decisions, T]."""


@dataclass(frozen=True)
class Decisions:
    """Columns of N decisions.

    Attributes:
        observations: what the policy saw; frames are uint8 still.
        tokens: int64 [N, T], what it chose; float32 from a policy that chooses numbers.
        behavior_log_prob: float32 [N, T], under the weights that acted.
        mask: bool [N, T], True where the token's control step ran.
        advantage: float32 [N, T], or [N, 1] where no trajectory has one for each token.
        temperature: float32 [N], at which the tokens were sampled.
        sequence: int64 [N], index of the trajectory.
        weight_version: int64 [N], of the weights that acted.
        proximal_log_prob: float32 [N, T], under the learner's weights before the update; None where no one asked.
        reference_log_prob: float32 [N, T], under the frozen reference policy; None where there is none.
        sequence_log_ratio: float32 [N, 1], mean log-ratio over the row's whole trajectory; None where no one asked.
        correction_weight: float32 [N, T], the engine correction over the whole update; None where there is none.
        action_tokens: tokens of one control step.
    """

    observations: tuple[Observation, ...]
    tokens: Tensor
    behavior_log_prob: Tensor
    mask: Tensor
    advantage: Tensor
    temperature: Tensor
    sequence: Tensor
    weight_version: Tensor
    proximal_log_prob: Tensor | None = None
    reference_log_prob: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    correction_weight: Tensor | None = None
    action_tokens: int = 1

    def __len__(self) -> int:
        return len(self.observations)

    @property
    def num_trajectories(self) -> int:
        """Trajectories that the decisions were made in."""
        return int(self.sequence[-1]) + 1

    def rows(self, index: Tensor) -> "Decisions":
        """Some of the decisions, int64 [M], in that order."""
        observations = tuple(self.observations[row] for row in index.tolist())
        columns: Any = {name: column[index] for name, column in self._columns()}
        return replace(self, observations=observations, **columns)

    def on(self, device: torch.device) -> "Decisions":
        """The same decisions with their columns on a device; observations stay where they are."""
        columns: Any = {name: column.to(device) for name, column in self._columns()}
        return replace(self, **columns)

    def _columns(self) -> list[tuple[str, Tensor]]:
        columns = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, column) for name, column in columns if isinstance(column, Tensor)]


def decisions_of(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage],
    reference_log_probs: Sequence[np.ndarray] | None = None,
) -> Decisions:
    """Flatten trajectories, in order.

    Args:
        trajectories: episodes with at least one decision between them.
        advantages: one for each trajectory.
        reference_log_probs: float32 [decisions, T] for each trajectory, or None.

    Raises: ValueError where there is nothing to learn from, or the advantages do not fit or are not finite.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories, expected one each.")
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if not steps:
        raise ValueError("the update has no decision, expected at least one; skip an update without trajectories.")
    lengths = [len(trajectory.steps) for trajectory in trajectories]
    temperatures = [trajectory.episode.sampling.temperature for trajectory in trajectories]
    kind = np.float32 if steps[0].chunk.tokens.dtype.kind == "f" else np.int64
    tokens = _stacked([step.chunk.tokens for step in steps], "tokens", kind)
    reference = None
    if reference_log_probs is not None:
        reference = torch.from_numpy(np.concatenate(list(reference_log_probs)).astype(np.float32))
        if reference.shape != tokens.shape:
            raise ValueError(f"reference_log_probs are {list(reference.shape)} in all, expected {list(tokens.shape)}.")
    return Decisions(
        observations=tuple(step.observation for step in steps),
        tokens=tokens,
        behavior_log_prob=_stacked([step.chunk.log_probs for step in steps], "log_probs", np.float32),
        mask=torch.from_numpy(np.stack([executed_tokens(step) for step in steps])),
        advantage=_row_advantages(trajectories, advantages, tokens.shape[1]),
        temperature=torch.from_numpy(np.repeat(np.array(temperatures, np.float32), lengths)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(trajectories)), lengths)),
        weight_version=torch.tensor([step.chunk.weight_version for step in steps]),
        reference_log_prob=reference,
        action_tokens=tokens.shape[1] // len(steps[0].chunk.actions),
    )


def executed_tokens(step: Step) -> np.ndarray:
    """bool [T]: the tokens of the first `num_executed` control steps."""
    num_tokens, horizon = len(step.chunk.tokens), len(step.chunk.actions)
    if num_tokens % horizon:
        raise ValueError(f"a chunk has {num_tokens} tokens for {horizon} control steps, expected a multiple of them.")
    return np.arange(num_tokens) < step.num_executed * (num_tokens // horizon)


def _row_advantages(trajectories: Sequence[Trajectory], advantages: Sequence[Advantage], num_tokens: int) -> Tensor:
    rows = [
        _checked_advantage(trajectory, advantage, num_tokens)
        for trajectory, advantage in zip(trajectories, advantages, strict=True)
    ]
    width = max(row.shape[1] for row in rows)
    columns = [np.broadcast_to(row, (len(row), width)) for row in rows]
    return torch.from_numpy(np.concatenate(columns).astype(np.float32))


def _checked_advantage(trajectory: Trajectory, advantage: Advantage, num_tokens: int) -> np.ndarray:
    """float64 [decisions, 1 or T]."""
    values, num_rows = np.asarray(advantage, dtype=np.float64), len(trajectory.steps)
    which = f"the advantage of episode {trajectory.episode.episode_id}"
    if values.shape not in ((), (num_rows,), (num_rows, num_tokens)):
        raise ValueError(
            f"{which} is {list(values.shape)}, expected one number, [{num_rows}] for its decisions, "
            f"or [{num_rows}, {num_tokens}] for their tokens."
        )
    if not np.isfinite(values).all():
        raise ValueError(f"{which} is not finite; look at the rewards of its group.")
    return values if values.ndim == 2 else np.broadcast_to(values.reshape(-1, 1), (num_rows, 1))


def _stacked(arrays: Sequence[np.ndarray], name: str, dtype: type[np.generic]) -> Tensor:
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise ValueError(f"the chunks' {name} have shapes {sorted(shapes)}, expected one; was the policy changed?")
    return torch.from_numpy(np.stack(arrays).astype(dtype, copy=False))
