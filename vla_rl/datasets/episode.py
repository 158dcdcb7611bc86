"""One recorded episode of any source, with the statistics of many."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.types import Observation

FrameReader: TypeAlias = Callable[[int], np.ndarray]
"""Maps a control step to uint8 [H, W, 3], RGB, oriented as in `LiberoEnv`; reads and decodes when
called, in any thread."""


class RecordedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """T control steps of one episode. Numbers are in memory, frames are read on demand.

    Example:
        RecordedEpisode(name="push_demo.hdf5: demo_3", instruction="push the plate", actions=...,  # [87, 7]
            vectors={"state": ...}, frames={"image": read_frame}, is_success=True)
    """

    name: str
    """Name of the episode in logs and errors; unique in its data set."""

    instruction: str
    """The task in words; of an episode whose task changes, its first one."""

    actions: np.ndarray
    """float32 [T, D], in the environment's units: in LIBERO, gripper +1 closes and -1 opens."""

    vectors: Mapping[str, np.ndarray]
    """Observation key, such as `state`, to float32 [T, D]: the values before each action."""

    frames: Mapping[str, FrameReader]
    """Observation key to its frames, such as `image` and `wrist_image`."""

    has_gripper: bool = True
    """Whether the last number of an action is a gripper command; never so for actions of one
    number."""

    rewards: np.ndarray | None = None
    """float32 [T], reward of each action; None if the source has none."""

    intervened: np.ndarray | None = None
    """bool [T], True for each action that an expert or a person chose instead of a policy; None if the
    source does not record it."""

    is_success: bool | None = None
    """Whether the task was solved; None if the source does not record it."""

    about: dict[str, str | int | float | bool] = {}
    """Further facts about the episode, such as its task and initial state."""

    instructions: tuple[str, ...] | None = None
    """The task of each control step, T of them, if it changes within the episode."""

    def __post_init__(self) -> None:
        if self.actions.ndim != 2 or len(self.actions) == 0:
            raise DataError(
                f"{self.name}: actions are {list(self.actions.shape)}, expected [T, D] with T >= 1."
            )
        if self.instructions is not None and len(self.instructions) != len(self.actions):
            raise DataError(
                f"{self.name}: {len(self.instructions)} instructions, expected one for each of "
                f"{len(self.actions)} actions, or none if the task does not change."
            )
        # Each row is one control step: a column that is longer or shorter would pair each
        # observation with another step's action.
        columns = {**self.vectors, **({} if self.rewards is None else {"rewards": self.rewards})}
        for key, values in self.vectors.items():
            if values.ndim != 2:
                raise DataError(
                    f"{self.name}: {key!r} is {list(values.shape)}, expected a vector for each "
                    f"step, [T, D]; reshape it with values.reshape({len(self.actions)}, -1)."
                )
        if self.rewards is not None and self.rewards.ndim != 1:
            raise DataError(
                f"{self.name}: rewards are {list(self.rewards.shape)}, expected a number for each "
                "step, [T]."
            )
        if self.intervened is not None and self.intervened.shape != (len(self.actions),):
            raise DataError(
                f"{self.name}: intervened is {list(self.intervened.shape)}, expected a bool for each "
                f"of {len(self.actions)} actions."
            )
        for key, values in columns.items():
            if len(values) != len(self.actions):
                raise DataError(
                    f"{self.name}: {len(values)} rows of {key!r}, expected {len(self.actions)} "
                    "like actions."
                )
        # one NaN makes every weight of a policy NaN in the first update, and nothing tells where it came from
        for key, values in {"actions": self.actions, **columns}.items():
            if not np.isfinite(values).all():
                step = int(np.argwhere(~np.isfinite(values))[0][0])
                raise DataError(
                    f"{self.name}: {key!r} of control step {step} holds NaN or infinity."
                )

    @property
    def num_steps(self) -> int:
        """Number of control steps, T."""
        return len(self.actions)

    @property
    def step_instructions(self) -> tuple[str, ...]:
        """The task in words at each control step, T of them."""
        return self.instructions or (self.instruction,) * len(self.actions)

    def observation(self, step: int, cameras: Collection[str] | None = None) -> Observation:
        """Return the observation before the action of `step`.

        It has the images of the named cameras; None: of all.

        Raises: DataError for a camera that it does not have.
        """
        # A policy that was told to see a camera must not be trained without it: it would learn to
        # act from an input that is always missing.
        lost = sorted(set(cameras or ()) - set(self.frames))
        if lost:
            raise DataError(
                f"{self.name} has no images {lost[0]!r}, only {sorted(self.frames)}; use a data "
                f"set with this camera or, if it has another name, set fields = {{{lost[0]!r}: "
                "...} to its feature."
            )
        seen: Observation = {
            key: read(step)
            for key, read in self.frames.items()
            if cameras is None or key in cameras
        }
        seen |= {key: values[step] for key, values in self.vectors.items()}
        words = self.instruction if self.instructions is None else self.instructions[step]
        return {**seen, "instruction": words}


NUMBER_KINDS: Final = "biuf"
"""NumPy's letters of the types that become float32."""


def require_numbers(values: Any, where: str) -> None:
    """Raise DataError, naming `where`, unless an array holds numbers, a row for each control step."""
    if values.dtype.kind not in NUMBER_KINDS or values.ndim == 0:
        raise DataError(
            f"{where} is {values.dtype} of shape {list(values.shape)}, expected numbers, a row for "
            "each control step."
        )


def require_images(values: Any, where: str) -> None:
    """Raise DataError, naming `where`, unless an array holds images, uint8 [T, H, W, 3]."""
    if values.dtype != np.uint8 or values.ndim != 4 or values.shape[3] != 3:
        raise DataError(
            f"{where} is {values.dtype} of shape {list(values.shape)}, expected images, uint8 "
            "[T, H, W, 3]."
        )


def compute_statistics(
    episodes: Sequence[RecordedEpisode], state_key: str = "state"
) -> dict[str, Any]:
    """Compute mean, spread, ends and 1st and 99th percentiles of every dimension.

    They are over all control steps, and plain values.

    As in OpenVLA's tools, the gripper counts as 0 = close, 1 = open and is not scaled (`mask`).
    Without a gripper, all numbers are scaled.

    Args:
        episodes: at least one, with signed grippers or none.
        state_key: the vector that is reported as `proprio`, if all episodes have it.

    Raises: DataError if the actions or vectors of two episodes have different numbers of
        dimensions, or if there is no episode.
    """
    if not episodes:
        raise DataError("there is no episode to compute statistics of, expected at least one.")
    actions = _join_rows(episodes, "actions", [each.actions for each in episodes])
    mask = [True] * actions.shape[1]
    if episodes[0].has_gripper and len(mask) > 1:
        # OpenVLA's published statistics have the gripper so; checkpoints that are read with them
        # expect it.
        actions[:, -1] = (1.0 - actions[:, -1]) / 2.0
        mask[-1] = False
    statistics: dict[str, Any] = {"action": {**_describe_rows(actions), "mask": mask}}
    if all(state_key in episode.vectors for episode in episodes):
        states = [episode.vectors[state_key] for episode in episodes]
        statistics["proprio"] = _describe_rows(_join_rows(episodes, state_key, states))
    return {**statistics, "num_transitions": len(actions), "num_trajectories": len(episodes)}


def _join_rows(
    episodes: Sequence[RecordedEpisode], name: str, parts: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the rows of all episodes, float64 [N, D]. Raises: DataError if widths differ."""
    for episode, part in zip(episodes, parts, strict=True):
        if part.shape[1] != parts[0].shape[1]:
            raise DataError(
                f"{name!r} has {part.shape[1]} numbers in {episode.name} and {parts[0].shape[1]} in "
                f"{episodes[0].name}, expected as many in every episode; read them as two data "
                "sets."
            )
    # float64: mean and spread of millions of float32 numbers would lose digits.
    joined: np.ndarray = np.concatenate(parts)
    return joined.astype(np.float64)


def _describe_rows(rows: np.ndarray) -> dict[str, list[float]]:
    rows = rows.astype(np.float64)
    found = {
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "max": rows.max(axis=0),
        "min": rows.min(axis=0),
        "q01": np.quantile(rows, 0.01, axis=0),
        "q99": np.quantile(rows, 0.99, axis=0),
    }
    return {name: values.tolist() for name, values in found.items()}
