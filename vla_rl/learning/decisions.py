"""The rows of an update: what was decided in its episodes, and nothing else.

Legend: N rows, T tokens a row. A row is one decision, or the turns of a conversation that fit together (`rows`). Rows after
the end of an episode do not exist, and the tokens of control steps that did not run are masked, so the mask ends at the
exact control step that ended the episode. Replies of different lengths are padded on the right, and the padding is masked.
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
    "the weights or inputs that it acted with hold NaN or infinity, or it reports something else than natural logs of "
    "probabilities after temperature"
)
BROKEN_REFERENCE: Final = (
    "look at the reference policy's weights, and whether it may choose the same tokens as the policy"
)


@dataclass(frozen=True)
class Decisions:
    """Columns of N rows.

    Attributes:
        observations: what the policy saw; frames are uint8 still.
        tokens: int64 [N, T], what it chose, `NO_TOKEN` beyond a row's end; float32 from a policy that chooses numbers.
        behavior_log_prob: float32 [N, T], under the weights that acted.
        mask: bool [N, T], True where the policy chose the token and its control step ran.
        advantage: float32 [N, T], or [N, 1] where every row has one number.
        temperature: float32 [N], at which the tokens were sampled.
        sequence: int64 [N], index of the trajectory.
        weight_version: int64 [N, T], of the weights that chose each token, or [N, 1] where no row has two.
        num_tokens: int64 [N], tokens of the row, without padding.
        num_read: int64 [N], tokens that a forward pass reads for it: those, and its prompt's where it has one.
        spans: for each row where the tokens of its decisions stand.
        proximal_log_prob: float32 [N, T], under the learner's weights before the update; None where no one asked.
        reference_log_prob: float32 [N, T], under the frozen reference policy; None where there is none.
        sequence_log_ratio: float32 [N, 1], mean log-ratio over the row's whole trajectory; None unless the loss needs it.
        sequence_drift: float32 [N, 1], mean of the engine's log-prob minus the current one over the row's whole trajectory;
            None unless the loss needs it.
        correction_weight: float32 [N, T], weights of the engine correction or of decoupled_ppo over the whole update; None
            if the loss has none.
        chosen_tokens: bool [N, T], what the loss chose among the whole mini-batch; None where no one asked.
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
        """Trajectories that the rows are from."""
        return int(self.sequence[-1]) + 1

    @property
    def num_decisions(self) -> int:
        """Decisions in all rows together."""
        return sum(len(spans) for spans in self.spans)

    def rows(self, index: Tensor) -> "Decisions":
        """Some of the rows, int64 [M], in that order, without columns that are padding in all of them."""
        chosen = index.tolist()
        full = self.mask.shape[1]
        width = int(self.num_tokens[index].max()) if chosen else full
        columns: Any = {
            name: column[index, :width] if column.ndim == 2 and column.shape[1] == full else column[index]
            for name, column in self._columns()
        }
        return replace(
            self,
            observations=tuple(self.observations[row] for row in chosen),
            spans=tuple(self.spans[row] for row in chosen),
            **columns,
        )

    def on(self, device: torch.device) -> "Decisions":
        """The same rows with their columns on a device; observations stay where they are."""
        columns: Any = {name: column.to(device) for name, column in self._columns()}
        return replace(self, **columns)

    def by_decision(self, values: Tensor) -> list[np.ndarray]:
        """[N, T] on the CPU, such as log-probs, cut into the tokens of each decision, in order of the decisions."""
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
        trajectories: episodes with at least one decision between them.
        advantages: one for each trajectory.
        reference_log_probs: for each trajectory float32 [T] of each decision, or None.

    Raises: ValueError if there is nothing to learn from, if log-probs or advantages do not fit, or for a number that is not
        finite, naming its episode and decision.
    """
    if len(trajectories) != len(advantages):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories, expected one each.")
    rows: list[Row] = []
    num_decisions = 0
    for number, (trajectory, advantage) in enumerate(zip(trajectories, advantages, strict=True)):
        reference = None if reference_log_probs is None else reference_log_probs[number]
        rows += rows_of(trajectory, number, num_decisions, advantage, reference)
        num_decisions += len(trajectory.steps)
    if not rows:
        raise ValueError("the update has no decision, expected at least one; skip an update without trajectories.")
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
        require_log_probs(decisions, decisions.reference_log_prob, "the reference's", BROKEN_REFERENCE)
    return decisions


def _action_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Tokens of one control step; of replies, which are one step of any length, each token counts by itself."""
    steps = [step for trajectory in trajectories for step in trajectory.steps]
    if any("prompt_tokens" in step.observation for step in steps):
        return 1
    sizes = {len(step.chunk.tokens) // len(step.chunk.actions) for step in steps}
    return sizes.pop() if len(sizes) == 1 else 1


def _require_one_length(rows: Sequence[Row]) -> None:
    """Only what follows prompts of tokens may have any length."""
    shapes = {part.shape for row in rows for part in row.tokens}
    if len(shapes) > 1 and not all("prompt_tokens" in row.observation for row in rows):
        raise ValueError(f"the chunks' tokens have shapes {sorted(shapes)}, expected one; was the policy changed?")


def _padded(
    rows: Sequence[Row],
    name: str,
    parts: Callable[[Row], Sequence[np.ndarray]],
    dtype: type[np.generic],
    padding: int = 0,
) -> Tensor:
    """[N, T], `padding` beyond each row's end."""
    padded = np.full((len(rows), max(row.num_tokens for row in rows)), padding, dtype)
    for line, row in zip(padded, rows, strict=True):
        joined = np.concatenate(list(parts(row)))
        if len(joined) != row.num_tokens:
            raise ValueError(f"a chunk has {len(joined)} {name} for {row.num_tokens} tokens, expected one each.")
        line[: len(joined)] = joined
    return torch.from_numpy(padded)


def _advantage_columns(rows: Sequence[Row]) -> Tensor:
    """float32 [N, T], or [N, 1] where every row is one decision with one number."""
    if all(len(row.advantage) == 1 and row.advantage[0].shape == (1,) for row in rows):
        return torch.tensor(np.concatenate([row.advantage[0] for row in rows]), dtype=torch.float32)[:, None]

    def spread(row: Row) -> list[np.ndarray]:
        return [np.broadcast_to(own, part.shape) for own, part in zip(row.advantage, row.tokens, strict=True)]

    return _padded(rows, "advantages", spread, np.float32)


def _version_columns(rows: Sequence[Row]) -> Tensor:
    """int64 [N, T], or [N, 1] where no row has tokens of two versions."""
    columns = _padded(rows, "weight_versions", lambda row: row.versions, np.int64)
    chosen = _padded(rows, "mask", lambda row: row.mask, np.bool_)
    oldest = torch.where(chosen, columns, torch.iinfo(torch.int64).max).amin(dim=1, keepdim=True)
    newest = torch.where(chosen, columns, -1).amax(dim=1, keepdim=True)
    return oldest if bool((oldest == newest).all()) else columns
