"""The rows of an update: exactly the decisions of its episodes.

Legend: N rows, T tokens a row. A row is one decision, or the turns of a conversation that can be
joined (`rows`). There are no rows after the end of an episode, and the tokens of control steps that
did not run are masked, so the mask ends at the exact control step that ended the episode. Replies
of different lengths are padded on the right, and the padding is masked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.learner.finiteness import require_log_probs
from vla_rl.learner.rows import (
    BY_ROW,
    RECORDED,
    Advantage,
    DecisionSlot,
    Row,
    TokenColumns,
    make_rows,
    narrowed,
)
from vla_rl.types import Observation, Trajectory

BROKEN_ENGINE: Final = (
    "the weights or inputs that it acted with hold NaN or infinity, or it reports something else "
    "than natural logs of probabilities after temperature"
)
BROKEN_REFERENCE: Final = (
    "look at the reference policy's weights, and whether it may choose the same tokens as the "
    "policy"
)


@dataclass(frozen=True, kw_only=True)
class Decisions(TokenColumns):
    """The columns of N rows, with what the policy observed before each.

    Attributes:
        observations: observations of the policy; frames are still uint8.
        slots: for each row, the slots of its decisions.
    """

    observations: tuple[Observation, ...]
    slots: tuple[tuple[DecisionSlot, ...], ...]

    def __len__(self) -> int:
        return len(self.observations)

    @property
    def num_trajectories(self) -> int:
        """Number of trajectories of the rows."""
        return int(self.sequence[-1]) + 1

    @property
    def num_decisions(self) -> int:
        """Number of decisions in all rows."""
        return sum(len(slots) for slots in self.slots)

    def rows(self, index: Tensor) -> "Decisions":
        """Select rows, int64 [M], in the given order, and drop columns that are padding in all of
        them.
        """
        chosen = index.tolist()
        full = self.mask.shape[1]
        # as wide as the longest row of these: a conversation of 4,000 tokens would make every other
        # micro-batch compute its padding
        width = int(self.num_tokens[index].max()) if chosen else full
        columns: Any = {
            name: column[index, :width]
            if column.ndim == 2 and column.shape[1] == full
            else column[index]
            for name, column in self.named_columns().items()
        }
        return replace(
            self,
            observations=tuple(self.observations[row] for row in chosen),
            slots=tuple(self.slots[row] for row in chosen),
            **columns,
        )

    def on_device(self, device: torch.device) -> "Decisions":
        """Return the same rows with columns on a device; observations stay where they are."""
        columns: Any = {
            name: to_device(column, device) for name, column in self.named_columns().items()
        }
        return replace(self, **columns)

    def split_by_decision(self, values: Tensor) -> list[np.ndarray]:
        """Split values on the CPU, [N, T], such as log-probs, into the tokens of each decision, in
        the order of the decisions."""
        # by the number of the decision: a conversation's turns share a row, and rows of agents
        # alternate
        found: dict[int, np.ndarray] = {}
        for row, slots in zip(values.numpy(), self.slots, strict=True):
            found |= {slot.decision: row[slot.start : slot.stop] for slot in slots}
        return [found[decision] for decision in sorted(found)]


def flatten_trajectories(
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
        rows += make_rows(trajectory, number, num_decisions, advantage, reference)
        num_decisions += len(trajectory.steps)
    if not rows:
        raise ValueError(
            "the update has no decision, expected at least one; skip an update "
            "without trajectories."
        )
    # padding is for replies only: chunks of different lengths mean that the policy was changed
    # between two episodes
    _require_one_length(rows)
    columns = {name: _padded(rows, name) for name in RECORDED}
    if reference_log_probs is None:
        del columns["reference_log_prob"]
    for name, column in columns.items():
        # one number a row where all its tokens have the same: it is sent to ranks with every
        # micro-batch
        if RECORDED[name].narrows:
            columns[name] = narrowed(column, columns["mask"])
    columns |= {name: torch.tensor([getattr(row, name) for row in rows]) for name in BY_ROW}
    decisions = Decisions(
        observations=tuple(row.full_observation for row in rows),
        slots=tuple(tuple(row.slots) for row in rows),
        action_tokens=_action_tokens(trajectories),
        **columns,
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
    # a reply is one control step of any length; clipped as one ratio, a long one would leave every
    # trust region
    if any("prompt_tokens" in step.observation for step in steps):
        return 1
    sizes = {step.chunk.tokens_per_step for step in steps}
    return sizes.pop() if len(sizes) == 1 else 1


def _require_one_length(rows: Sequence[Row]) -> None:
    """Raise ValueError if chunks differ in length; only rows that follow prompts of tokens may."""
    shapes = {part.shape for row in rows for part in row.parts["tokens"]}
    if len(shapes) > 1 and not all("prompt_tokens" in row.observation for row in rows):
        raise ValueError(
            f"the chunks' tokens have shapes {sorted(shapes)}, expected one; was the "
            "policy changed?"
        )


def _padded(rows: Sequence[Row], name: str) -> Tensor:
    """Join and pad the parts of each row: [N, T], with the fill value beyond the row's end."""
    column = RECORDED[name]
    kind = np.float32 if rows[0].parts[name][0].dtype.kind == "f" else np.int64
    shape = len(rows), max(row.num_tokens for row in rows)
    padded = np.full(shape, column.fill, column.dtype or kind)
    for line, row in zip(padded, rows, strict=True):
        joined = np.concatenate(row.parts[name])
        line[: len(joined)] = joined
    return torch.from_numpy(padded)
