"""One recorded episode of any source: each control step's observation and action."""

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.types import Observation

FrameReader: TypeAlias = Callable[[int], np.ndarray]
"""Maps a control step to uint8 [H, W, 3], RGB, oriented as in `LiberoEnv`; reads and decodes when
called, in any thread."""


class RecordedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """T control steps of one episode. Numbers are in memory, frames are read on demand."""

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
        for key, values in columns.items():
            if len(values) != len(self.actions):
                raise DataError(
                    f"{self.name}: {len(values)} rows of {key!r}, expected {len(self.actions)} "
                    "like actions."
                )
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
    def words(self) -> tuple[str, ...]:
        """The task in words at each control step, T of them."""
        return self.instructions or (self.instruction,) * len(self.actions)

    def observation(self, step: int, cameras: Collection[str] | None = None) -> Observation:
        """Return the observation before the action of `step`.

        It has the images of the named cameras; None: of all.

        Raises: DataError for a camera that it does not have.
        """
        lost = sorted(set(cameras or ()) - set(self.frames))
        if lost:
            raise DataError(
                f"{self.name} has no pictures {lost[0]!r}, only {sorted(self.frames)}; use a data "
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
