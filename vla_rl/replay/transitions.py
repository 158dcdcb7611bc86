"""One transition of off-policy learning: a decision, what it earned, and the state after it.

A row holds fixed-size numbers alone, so that a file of rows is an array. Its columns:

    features, next_features       float16 or float32 [Z], the frozen base's features
    proprio, next_proprio         float32 [P], the robot's own state; P may be 0
    reference, next_reference     float32 [A], what the base would do; zeros for heads without one
    action                        float32 [A], the head's action, or what an expert did instead
    expert_action, has_expert     float32 [A] and bool, what an expert would have done
    rewards, num_rewards          float32 [C] and int32, of the control steps that ran, zeros behind them
    intervened                    bool [C], control steps that an expert or a person chose
    terminated, truncated         bool; the last row of an episode has one of them
    return_to_go, steps_to_end    float32, undiscounted rewards from here on; int32, control steps
    is_success                    bool, of the episode
    task                          int32, index into the names of tasks of a file or a buffer
    head_version, episode, decision   int64

The row behind a truncation bootstraps from next_features and next_reference; behind a termination they
are zeros.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.types import (
    DecisionRewards,
    ExplainsFields,
    Step,
    Trajectory,
)

MOST_NUMBERS: Final = 1 << 22
"""Most numbers of one column, so that a header that claims more cannot ask for gigabytes a row."""

ActionEncoder: TypeAlias = Callable[[np.ndarray], np.ndarray]
"""Maps a chunk in the environment's units, float32 [H, D], to the head's action, float32 [A]."""


class TransitionLayout(msgspec.Struct, metaclass=ExplainsFields, frozen=True, kw_only=True):
    """Sizes of a row, and the frozen base that its features and references come from.

    Example:
        TransitionLayout(features=256, proprio=8, action=56, horizon=8, action_dim=7, kind="residual",
                         base_digest="5e1c...")
    """

    features: int
    """Z, numbers of the base's features."""

    proprio: int
    """P, numbers of proprioception."""

    action: int
    """A, numbers of the head's action."""

    horizon: int
    """C, control steps of a chunk."""

    action_dim: int
    """D, numbers of one control step; A = C * D for residual heads."""

    kind: str
    """Meaning of `action`: residual, noise or tokens."""

    base_digest: str
    """SHA-256 of the frozen base."""

    features_dtype: Literal["float16", "float32"] = "float32"
    """Type in which features are stored; float16 halves a row."""

    def __post_init__(self) -> None:
        for name in ("features", "proprio", "action", "horizon", "action_dim"):
            value, least = getattr(self, name), int(name != "proprio")
            if type(value) is not int or not least <= value <= MOST_NUMBERS:
                raise ValueError(
                    f"TransitionLayout.{name} is {value!r}, expected a whole number from {least} to "
                    f"{MOST_NUMBERS}"
                )

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The type of a row, little-endian; its size is a multiple of 8 bytes, as torch needs it."""
        return _make_dtype(self)

    def make_empty_rows(self, num_rows: int) -> np.ndarray:
        """Return rows of zeros, padding included."""
        return np.zeros(num_rows, self.row_dtype)

    def describe_difference(self, other: "TransitionLayout") -> str | None:
        """Return the first field in which `other` differs, with both values; None if there is none."""
        for name in self.__struct_fields__:
            mine, its = getattr(self, name), getattr(other, name)
            if mine != its:
                return f"{name} is {its!r}, expected {mine!r}"
        return None


@functools.lru_cache(maxsize=64)
def _make_dtype(layout: TransitionLayout) -> np.dtype[Any]:
    state = {"float16": "<f2", "float32": "<f4"}[layout.features_dtype]
    columns: list[tuple[str, str] | tuple[str, str, tuple[int]]] = [
        # int64 first: the type's alignment is theirs, so that rows of an array stay aligned
        *((name, "<i8") for name in ("head_version", "episode", "decision")),
        *((name, state, (layout.features,)) for name in ("features", "next_features")),
        *((name, "<f4", (layout.proprio,)) for name in ("proprio", "next_proprio")),
        *(
            (name, "<f4", (layout.action,))
            for name in ("reference", "next_reference", "action", "expert_action")
        ),
        ("rewards", "<f4", (layout.horizon,)),
        ("return_to_go", "<f4"),
        *((name, "<i4") for name in ("num_rewards", "steps_to_end", "task")),
        ("intervened", "?", (layout.horizon,)),
        *((name, "?") for name in ("has_expert", "terminated", "truncated", "is_success")),
    ]
    return np.dtype(columns, align=True)


class EpisodeRows(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one episode, in the order of its decisions.

    Example:
        EpisodeRows(episode_id=42, task="libero_goal/3", rows=rows)  # as `make_rows` returns it
    """

    episode_id: int
    task: str
    rows: np.ndarray
    """[decisions] of `TransitionLayout.row_dtype`; its column `task` is set by the buffer that stores the rows."""

    @property
    def is_success(self) -> bool:
        """Whether the episode solved its task."""
        return bool(self.rows["is_success"][-1])


def make_rows(
    trajectory: Trajectory,
    layout: TransitionLayout,
    final_state: Mapping[str, np.ndarray] | None = None,
    *,
    rewards: DecisionRewards | None = None,
    encode_action: ActionEncoder | None = None,
) -> EpisodeRows:
    """Return the rows of a trajectory whose policy recorded its states in `ActionChunk.drawn`.

    Args:
        trajectory: an episode of a steered policy, arrays included.
        layout: the sizes to expect.
        final_state: features [Z], proprio [P] and reference [A] of the final observation; needed if the
            episode was cut off, since a value then bootstraps from them.
        rewards: float32 [decisions], instead of the environment's rewards; each counts at the last
            control step of its decision.
        encode_action: turns an expert's chunk into the head's action. None: expert's labels are left
            out, and an intervention keeps the head's own numbers.

    Raises: DataError with the episode, the decision and the value that does not fit.
    """
    steps = trajectory.steps
    name = f"episode {trajectory.episode.episode_id} ({trajectory.episode.task})"
    if not steps:
        raise DataError(f"{name} has no decision, expected at least one.")
    rows = layout.make_empty_rows(len(steps))
    with np.errstate(over="ignore"):  # infinite as float16, and refused as such
        for key in ("features", "proprio", "reference"):
            rows[key] = [
                _get_drawn(step, key, layout, f"{name}, decision {number}")
                for number, step in enumerate(steps)
            ]
            rows[f"next_{key}"][:-1] = rows[key][1:]
        if trajectory.stop_reason.is_cut_off:
            _set_final_state(rows, layout, final_state, name)
    for number, step in enumerate(steps):
        where = f"{name}, decision {number}"
        _set_action(rows[number], step, layout, encode_action, where)
        _set_rewards(rows[number], step, None if rewards is None else float(rewards[number]), where)
    set_episode_columns(
        rows,
        episode_id=trajectory.episode.episode_id,
        is_success=trajectory.is_success,
        is_cut_off=trajectory.stop_reason.is_cut_off,
    )
    rows["head_version"] = [step.chunk.weight_version for step in steps]
    require_valid_rows(rows, name)
    return EpisodeRows(
        episode_id=trajectory.episode.episode_id, task=trajectory.episode.task, rows=rows
    )


def _get_drawn(step: Step, key: str, layout: TransitionLayout, where: str) -> np.ndarray:
    drawn = step.chunk.drawn or {}
    if key not in drawn:
        raise DataError(
            f"{where} recorded {sorted(drawn) or 'nothing'}, expected {key!r}: rows come from episodes of "
            "a steered policy."
        )
    return _require_size(
        drawn[key], getattr(layout, "action" if key == "reference" else key), key, where
    )


def _require_size(given: Any, size: int, key: str, where: str) -> np.ndarray:
    values: np.ndarray = np.asarray(given)
    if values.shape != (size,) or values.dtype.kind not in "fiu":
        raise DataError(
            f"{where}: {key!r} is {values.dtype} of shape {list(values.shape)}, expected {size} numbers; "
            "the layout of the rows is another policy's."
        )
    return values


def _set_final_state(
    rows: np.ndarray, layout: TransitionLayout, state: Mapping[str, np.ndarray] | None, name: str
) -> None:
    for key, size in {
        "features": layout.features, "proprio": layout.proprio, "reference": layout.action
    }.items():  # fmt: skip
        if state is None or key not in state:
            raise DataError(
                f"{name} was cut off and its final state has no {key!r}, expected the policy's "
                "`describe_states` of the final observation, from which its value bootstraps."
            )
        rows[f"next_{key}"][-1] = _require_size(state[key], size, key, f"{name}, final state")


def _set_action(
    row: Any, step: Step, layout: TransitionLayout, encode: ActionEncoder | None, where: str
) -> None:
    row["action"] = _require_size(step.chunk.tokens, layout.action, "action", where)
    if len(step.chunk.actions) != layout.horizon:
        raise DataError(
            f"{where} is a chunk of {len(step.chunk.actions)} control steps, expected {layout.horizon}; "
            "rows of two chunk lengths do not fit into one buffer."
        )
    intervened, expert = step.intervened, step.expert_actions
    if intervened is not None:
        row["intervened"][: len(intervened)] = intervened
        if encode is not None and np.any(intervened):
            # what ran, and not what the head had proposed: a critic values the former
            row["action"] = _require_size(
                encode(step.chunk.actions), layout.action, "action", where
            )
    if encode is not None and expert is not None:
        row["expert_action"] = _require_size(encode(expert), layout.action, "expert_action", where)
        row["has_expert"] = True


def _set_rewards(row: Any, step: Step, reward: float | None, where: str) -> None:
    count = step.num_executed
    if not 1 <= count <= len(row["rewards"]):
        raise DataError(
            f"{where} has {count} rewards, expected 1 to {len(row['rewards'])}, one for each control step."
        )
    if reward is None:
        row["rewards"][:count] = step.rewards
    else:
        row["rewards"][count - 1] = reward
    row["num_rewards"] = count


def set_episode_columns(
    rows: np.ndarray, *, episode_id: int, is_success: bool, is_cut_off: bool
) -> None:
    """Set the columns that follow from the order of an episode's rows and from its end.

    `rewards` and `num_rewards` have to be set before.
    """
    rows["episode"], rows["decision"] = episode_id, np.arange(len(rows))
    rows["is_success"] = is_success
    rows["truncated"][-1], rows["terminated"][-1] = is_cut_off, not is_cut_off
    rows["steps_to_end"] = np.cumsum(rows["num_rewards"][::-1])[::-1]
    earned = rows["rewards"].sum(axis=1, dtype=np.float64)
    rows["return_to_go"] = np.cumsum(earned[::-1])[::-1]


FINITE_COLUMNS: Final = (
    "rewards", "action", "features", "proprio", "reference", "expert_action",
    "next_features", "next_proprio", "next_reference",
)  # fmt: skip


def require_valid_rows(rows: np.ndarray, name: str) -> None:
    """Raise DataError, naming the episode, unless all numbers are finite and the rows are one episode."""
    for key in FINITE_COLUMNS:
        bad = ~np.isfinite(rows[key]).all(axis=1)
        if bad.any():
            hint = "; store features as float32" if rows[key].dtype == np.float16 else ""
            raise DataError(
                f"{name}: {key!r} of decision {int(np.argmax(bad))} holds NaN or infinity, expected finite "
                f"numbers{hint}."
            )
    ends = rows["terminated"] | rows["truncated"]
    if ends[:-1].any() or not ends[-1]:
        raise DataError(
            f"{name}: its rows end at {np.flatnonzero(ends).tolist()}, expected the last alone."
        )


def discount_returns(rows: np.ndarray, gamma: float) -> np.ndarray:
    """Return the discounted rewards from each row to the end of its episode, float32 [N].

    Args:
        rows: whole episodes, one after another.
        gamma: discount of one control step, in (0, 1].
    """
    weights = gamma ** np.arange(rows["rewards"].shape[1])
    earned = (rows["rewards"] * weights).sum(axis=1)
    follow = np.where(rows["terminated"] | rows["truncated"], 0.0, gamma ** rows["num_rewards"])
    returns = np.zeros(len(rows))
    later = 0.0
    for number in range(len(rows) - 1, -1, -1):
        later = returns[number] = earned[number] + follow[number] * later
    return returns.astype(np.float32)


def copy_rows(rows: np.ndarray) -> np.ndarray:
    """Return a copy of rows, padding included."""
    return join_rows([rows])


def join_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows one after another, byte by byte: NumPy's own copies leave padding undefined."""
    joined = np.concatenate([part.view(np.uint8).reshape(len(part), -1) for part in parts])
    rows: np.ndarray = joined.view(parts[0].dtype)[:, 0]
    return rows


def list_tasks(episodes: Sequence[EpisodeRows]) -> tuple[str, ...]:
    """Return the names of all tasks, each once, in order of first appearance."""
    return tuple(dict.fromkeys(episode.task for episode in episodes))
