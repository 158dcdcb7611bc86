"""Connect a data set to an imitator: samples on demand, augmentation, statistics."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from vla_rl.datasets import RecordedEpisode
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner.imitation import Demonstration
from vla_rl.models.families import require_method
from vla_rl.models.images import AugmentationConfig
from vla_rl.models.observed_values import OTHER_UNITS, find_other_units
from vla_rl.types import Observation

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy


class Samples:
    """Samples of a data set, one for each control step of every episode.

    A sample is the observation, and the chunk from there on.

    Frames are read when a sample is requested. A chunk that reaches beyond the episode is marked as
    shorter.

    Raises: DataError if the actions, gripper, cameras or states of an episode, or the images of the first
    one, do not match the policy.
    """

    def __init__(self, episodes: Sequence[RecordedEpisode], policy: "RobotPolicy") -> None:
        self._episodes = tuple(episodes)
        _refuse_offsets(policy)
        for episode in self._episodes:
            _require_fitting(episode, policy)
        _require_same_units(self._episodes, policy)
        # of the first alone: of others, a video may have to be opened for each
        _require_image_size(self._episodes[0], policy)
        # a flow policy learns whole chunks, of which it may execute the first rows alone
        self._chunk_size: int = getattr(policy.config, "horizon", policy.config.chunk_size)
        self._cameras = policy.config.cameras
        # searched in the logarithm of the number of episodes; a list of all samples would be as
        # long as the data
        self._ends = np.cumsum([episode.num_steps for episode in episodes])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def demonstrations(self, indices: Sequence[int]) -> list[Demonstration]:
        """Read the samples of these numbers; blocks meanwhile.

        Raises: DataError, naming the frame, if one is damaged.
        """
        return [self._demonstration(index) for index in indices]

    def read_one_of_each_episode(self) -> None:
        """Read the first sample of every episode, with its images.

        Raises: DataError, naming what cannot be read.
        """
        for episode in self._episodes:
            episode.observation(0, self._cameras)

    def _demonstration(self, index: int) -> Demonstration:
        number = int(np.searchsorted(self._ends, index, side="right"))
        episode = self._episodes[number]
        step = index - int(self._ends[number]) + episode.num_steps
        rest = episode.actions[step : step + self._chunk_size]
        # the rest stays zero: it has no loss, as `num_valid` says
        chunk = np.zeros((self._chunk_size, episode.actions.shape[1]), np.float32)
        chunk[: len(rest)] = rest
        return Demonstration(
            observation=episode.observation(step, self._cameras), actions=chunk, num_valid=len(rest)
        )


def _require_fitting(episode: RecordedEpisode, policy: "RobotPolicy") -> None:
    """Raise DataError unless `policy` can learn from `episode`."""
    config, width = policy.config, episode.actions.shape[1]
    if width != config.action_dim:
        raise DataError(
            f"{episode.name} has actions of {width} numbers, expected {config.action_dim} "
            "for this policy; use the data's own statistics (--statistics data) to train it for "
            "another robot, or use other data."
        )
    # families whose statistics name the convention of the gripper
    bounds: Any = getattr(config, "action_bounds", None)
    if not episode.has_gripper and bounds is not None and bounds.gripper == "openvla":
        raise DataError(
            f"the actions of {episode.name} have no gripper, but the policy treats their last "
            "number as one; use the data's own statistics (--statistics data)."
        )
    lost = [camera for camera in config.cameras if camera not in episode.frames]
    if lost:
        raise DataError(
            f"{episode.name} has no images {lost[0]!r}, only {sorted(episode.frames)}; choose "
            "the policy's cameras (--cameras), or map the data's names (--data.fields)."
        )
    if config.state_size is None:
        return
    key = _state_key(policy)
    vector = episode.vectors.get(key)
    if vector is None or vector.shape[1] != config.state_size:
        found = "none" if vector is None else f"{vector.shape[1]} numbers"
        raise DataError(
            f"{episode.name} has {found} of {key!r}, and the policy reads "
            f"{config.state_size}; use other data, or a policy without proprioception."
        )


def _refuse_offsets(policy: "RobotPolicy") -> None:
    """Raise ConfigError for a policy whose actions are offsets from the state, which demonstrations are not."""
    num_offsets = getattr(policy.config, "state_offsets", 0)
    if num_offsets:
        raise ConfigError(
            f"the first {num_offsets} numbers of the policy's actions are offsets from the state "
            "(state_offsets), which is not fine-tuned; use the statistics of the data (--statistics data) "
            "and leave state_offsets out: then it learns the data's own actions"
        )


def _require_same_units(episodes: Sequence[RecordedEpisode], policy: "RobotPolicy") -> None:
    """Raise DataError if actions are far outside of the statistics of an OpenVLA policy.

    They would be clipped to one value each, without an error. `sft_flow` asks a folder itself.
    """
    bounds: Any = getattr(policy.config, "action_bounds", None)
    if bounds is None:
        return
    # zero twice, and so not looked at, where a number is not scaled
    low, high = (np.where(bounds.is_scaled, each, 0.0) for each in (bounds.low, bounds.high))
    data = np.concatenate([episode.actions for episode in episodes])
    number = find_other_units(low, high, data)
    if number is not None:
        own = np.quantile(data[:, number], (0.01, 0.99))
        raise DataError(
            f"number {number} of the actions is from {own[0]:.3g} to {own[1]:.3g} in the data, but from "
            f"{low[number]:.3g} to {high[number]:.3g} in the policy's statistics: {OTHER_UNITS}"
        )


def _require_image_size(episode: RecordedEpisode, policy: "RobotPolicy") -> None:
    """Raise DataError if a policy that resizes no images is shown those of another size."""
    size: int | None = getattr(policy.config, "fixed_image_size", None)
    for camera in policy.config.cameras if size is not None else ():
        shape = episode.frames[camera](0).shape
        if shape != (size, size, 3):
            raise DataError(
                f"{episode.name} has images {camera!r} of {list(shape)}, expected [{size}, {size}, 3], because the "
                "policy does not resize any; use data that were drawn at this size, or a new policy."
            )


def _state_key(policy: "RobotPolicy") -> str:
    proprio: Any = getattr(policy.config, "proprio", None)
    return "state" if proprio is None else str(proprio.key)


def augmented_batches(
    policy: Any, config: AugmentationConfig, generator: torch.Generator
) -> Callable[[Sequence[Observation]], Any]:
    """Return a `policy.prepare` that augments frames.

    Call it in one thread, because all batches draw from `generator`.

    Raises: ConfigError if the policy's family has no augmentation (`augmented_preparation`).
    """
    augment = require_method(policy, "augmented_preparation", "augment")
    prepare: Callable[[Sequence[Observation]], Any] = augment(config, generator)
    return prepare


def seeded_batches(
    policy: Any, settings: Mapping[str, Any]
) -> Callable[[Sequence[Observation], int], Any]:
    """Return a function that prepares observations as `augmented_batches`, drawing from a seed.

    Args:
        policy: the policy.
        settings: those of an `AugmentationConfig`.
    """
    generator = torch.Generator()
    config = msgspec.convert(dict(settings), AugmentationConfig)
    prepare = augmented_batches(policy, config, generator)

    def seeded(observations: Sequence[Observation], seed: int) -> Any:
        # a seed for each batch: a resumed run augments the samples that are left as the first one
        # would have
        generator.manual_seed(seed)
        return prepare(observations)

    return seeded
