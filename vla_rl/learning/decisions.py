"""The rows of an update: exactly the decisions of its episodes.

Legend: N rows, T tokens a row. A row is one decision, or the turns of a conversation that can be
joined (`rows`). There are no rows after the end of an episode, and the tokens of control steps that
did not run are masked, so the mask ends at the exact control step that ended the episode. Replies
of different lengths are padded on the right, and the padding is masked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.policy_model import NO_TOKEN
from vla_rl.learning.rows import Advantage, Row, Span, rows_of
from vla_rl.learning.sound_numbers import require_log_probs
from vla_rl.types import Observation, Trajectory

BROKEN_ENGINE: Final = (
    "the weights or inputs that it acted with hold NaN or infinity, or it reports something else "
    "than natural logs of "
    "probabilities after temperature"
)
BROKEN_REFERENCE: Final = (
    "look at the reference policy's weights, and whether it may choose the same tokens as the "
    "policy"
)


@dataclass(frozen=True)
class Decisions:
    """Columns of N rows.

    Attributes:
        observations: observations of the policy; frames are still uint8.
        tokens: int64 [N, T], the chosen tokens, `NO_TOKEN` beyond a row's end; float32 from a
            policy that chooses numbers.
        behavior_log_prob: float32 [N, T], under the weights that acted.
        mask: bool [N, T], True where the policy chose the token and its control step ran.
        advantage: float32 [N, T], or [N, 1] if every row has one number.
        temperature: float32 [N], the sampling temperature of the tokens.
        sequence: int64 [N], index of the trajectory.
        weight_version: int64 [N, T], version of the weights that chose each token, or [N, 1] if no
            row has two versions.
        num_tokens: int64 [N], number of tokens of the row, without padding.
        num_read: int64 [N], number of tokens that a forward pass reads for the row: its own, and
            those of its prompt if it has one.
        spans: for each row, the positions of the tokens of its decisions.
        proximal_log_prob: float32 [N, T], under the learner's weights before the update; None
            unless the loss needs it.
        reference_log_prob: float32 [N, T], under the frozen reference policy; None without a
            reference.
        sequence_log_ratio: float32 [N, 1], mean log-ratio over the row's whole trajectory; None
            unless the loss needs it.
        sequence_drift: float32 [N, 1], mean of the engine's log-prob minus the current one over the
            row's whole trajectory; None unless the loss needs it.
        correction_weight: float32 [N, T], weights of the engine correction or of decoupled_ppo over
            the whole update; None if the loss has none.
        chosen_tokens: bool [N, T], tokens that the loss chose from the whole mini-batch; None
            unless the loss needs it.
        action_tokens: number of tokens of one control step.
    """

    observations: tuple[Observation, ...]
    tokens: Tensor
    behavior_log_prob: Tensor
    mask: Tensor
    advantage: Tensor
    temperature: Tensor
    sequence: Tensor
    weight_version: Tensor
    num_tokens: Tensor
    num_read: Tensor
    spans: tuple[tuple[Span, ...], ...]
    proximal_log_prob: Tensor | None = None
    reference_log_prob: Tensor | None = None
    sequence_log_ratio: Tensor | None = None
    sequence_drift: Tensor | None = None
    correction_weight: Tensor | None = None
    chosen_tokens: Tensor | None = None
    action_tokens: int = 1

    def __len__(self) -> int:
        return len(self.observations)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories of the rows."""
        return int(self.sequence[-1]) + 1

    @property
    def num_decisions(self) -> int:
        """Number of decisions in all rows."""
        return sum(len(spans) for spans in self.spans)

    def rows(self, index: Tensor) -> "Decisions":
        """Select rows, int64 [M], in the given order, and drop columns that are padding in all of
        them.
        """
        chosen = index.tolist()
        full = self.mask.shape[1]
        width = int(self.num_tokens[index].max()) if chosen else full
        columns: Any = {
            name: column[index, :width]
            if column.ndim == 2 and column.shape[1] == full
            else column[index]
            for name, column in self._columns()
        }
        return replace(
            self,
            observations=tuple(self.observations[row] for row in chosen),
            spans=tuple(self.spans[row] for row in chosen),
            **columns,
        )

    def on(self, device: torch.device) -> "Decisions":
        """Copy the columns to a device; observations stay where they are."""
        columns: Any = {name: column.to(device) for name, column in self._columns()}
        return replace(self, **columns)

    def by_decision(self, values: Tensor) -> list[np.ndarray]:
        """Split values on the CPU, [N, T], such as log-probs, into the tokens of each decision, in
        the order of the decisions."""
        found: dict[int, np.ndarray] = {}
        for row, spans in zip(values.numpy(), self.spans, strict=True):
            found |= {span.decision: row[span.start : span.stop] for span in spans}
        return [found[decision] for decision in sorted(found)]

    def _columns(self) -> list[tuple[str, Tensor]]:
        columns = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return [(name, column) for name, column in columns if isinstance(column, Tensor)]


def decisions_of(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[Advantage],
    reference_log_probs: Sequence[Sequence[np.ndarray] | np.ndarray] | None = None,
) -> Decisions:
    """Flatten trajectories, in order.

    Args:
        trajectories: episodes that together have at least one decision.
        advantages: one for each trajectory.
        reference_log_probs: for each trajectory float32 [T] of each decision, or None.

    Raises: ValueError if there is nothing to learn from, if log-probs or advantages do not fit, or
        for a number that is not finite, naming its episode and decision.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(
            f"{len(advantages)} advantages for {len(trajectories)} trajectories, expected one each."
        )
    rows: list[Row] = []
    num_decisions = 0
    for number, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        reference = None if reference_log_probs is None else reference_log_probs[number]
        rows += rows_of(trajectory, number, num_decisions, advantage, reference)
        num_decisions += len(trajectory.steps)
    if not rows:
        raise ValueError(
            "the update has no decision, expected at least one; skip an update "
            "without trajectories."
        )
    _require_one_length(rows)
    kind = np.float32 if rows[0].tokens[0].dtype.kind == "f" else np.int64
    with_reference = reference_log_probs is not None
    decisions = Decisions(
        observations=tuple(row.seen for row in rows),
        tokens=_padded(rows, "tokens", lambda row: row.tokens, kind, NO_TOKEN),
        behavior_log_prob=_padded(rows, "log_probs", lambda row: row.log_probs, np.float32),
        mask=_padded(rows, "mask", lambda row: row.mask, np.bool_),
        advantage=_advantage_columns(rows),
        temperature=torch.tensor([row.temperature for row in rows]),
        sequence=torch.tensor([row.sequence for row in rows]),
        weight_version=_version_columns(rows),
        num_tokens=torch.tensor([row.num_tokens for row in rows]),
        num_read=torch.tensor([row.num_read for row in rows]),
        spans=tuple(tuple(row.spans) for row in rows),
        reference_log_prob=_padded(rows, "reference", lambda row: row.reference, np.float32)
        if with_reference
        else None,
        action_tokens=_action_tokens(trajectories),
    )
    require_log_probs(decisions, decisions.behavior_log_prob, "the engine's", BROKEN_ENGINE)
    if decisions.reference_log_prob is not None:
        require_log_probs(
            decisions, decisions.reference_log_prob, "the reference's", BROKEN_REFERENCE
        )
    return decisions


def _action_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return the tokens per control step: 1 for replies, which are one step of any length, so that
    each token counts alone."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if any("prompt_tokens" in step.observation for step in steps):
        return 1
    sizes = {step.chunk.tokens_per_step for step in steps}
    return sizes.pop() if len(sizes) == 1 else 1


def _require_one_length(rows: Sequence[Row]) -> None:
    """Raise ValueError if chunks differ in length; only rows that follow prompts of tokens may."""
    shapes = {part.shape for row in rows for part in row.tokens}
    if len(shapes) > 1 and not all("prompt_tokens" in row.observation for row in rows):
        raise ValueError(
            f"the chunks' tokens have shapes {sorted(shapes)}, expected one; was the "
            "policy changed?"
        )


def _padded(
    rows: Sequence[Row],
    name: str,
    parts: Callable[[Row], Sequence[np.ndarray]],
    dtype: type[np.generic],
    padding: int = 0,
) -> Tensor:
    """Join and pad the parts of each row: [N, T], with `padding` beyond the row's end."""
    padded = np.full((len(rows), max(row.num_tokens for row in rows)), padding, dtype)
    for line, row in zip(padded, rows, strict=True):
        joined = np.concatenate(list(parts(row)))
        if len(joined) != row.num_tokens:
            raise ValueError(
                f"a chunk has {len(joined)} {name} for {row.num_tokens} tokens, expected one each."
            )
        line[: len(joined)] = joined
    return torch.from_numpy(padded)


def _advantage_columns(rows: Sequence[Row]) -> Tensor:
    """Return the advantages, float32 [N, T], or [N, 1] if every row is one decision with one
    number.
    """
    if all(len(row.advantage) == 1 and row.advantage[0].shape == (1,) for row in rows):
        return torch.tensor(
            np.concatenate([row.advantage[0] for row in rows]), dtype=torch.float32
        )[:, None]

    def spread(row: Row) -> list[np.ndarray]:
        return [
            np.broadcast_to(own, part.shape)
            for own, part in zip(row.advantage, row.tokens, strict=True)
        ]

    return _padded(rows, "advantages", spread, np.float32)


def _version_columns(rows: Sequence[Row]) -> Tensor:
    """Return the weight versions, int64 [N, T], or [N, 1] if no row has tokens of two versions."""
    columns = _padded(rows, "weight_versions", lambda row: row.versions, np.int64)
    chosen = _padded(rows, "mask", lambda row: row.mask, np.bool_)
    oldest = torch.where(chosen, columns, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    newest = torch.where(chosen, columns, -1).amax(dim=1, keepdim=True)
    return oldest if bool((oldest == newest).all()) else columns
