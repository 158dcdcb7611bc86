"""Connect a data set to an imitator: samples on demand, augmentation, statistics."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from vla_rl.datasets import RecordedEpisode
from vla_rl.errors import DataError
from vla_rl.learner.imitation import Demonstration
from vla_rl.models.images import AugmentationConfig
from vla_rl.models.images.pipeline import training_pipeline
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.models.openvla_oft.checkpoint import EPSILON
from vla_rl.models.prismatic.config import OpenVlaConfig, ProprioConfig
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.processor import PrismaticBatch, PrismaticProcessor, read_tokenizer
from vla_rl.models.prismatic.public_config import Extension
from vla_rl.models.prismatic.statistics import (
    STATISTICS_FILE,
    Statistics,
    get_action_bounds,
    get_gripper,
    get_proprio,
)
from vla_rl.types import Observation

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy
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
        for episode in self._episodes:
            _require_fitting(episode, policy)
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
    policy: "VlaPolicy", config: AugmentationConfig, generator: torch.Generator
) -> Callable[[Sequence[Observation]], PrismaticBatch]:
    """Return a `policy.prepare` that augments frames.

    Call it in one thread, because all batches draw from `generator`.
    """
    pipeline = training_pipeline(policy.config.images, config, generator)
    tokenizer = read_tokenizer(policy.config)
    processor = PrismaticProcessor(policy.config, tokenizer, _proprio_config(policy), pipeline)
    device = next(policy.network.parameters()).device
    return lambda observations: processor.prepare(observations, device)


def seeded_batches(
    policy: "VlaPolicy", settings: Mapping[str, Any]
) -> Callable[[Sequence[Observation], int], PrismaticBatch]:
    """Return a function that prepares observations as `augmented_batches`, drawing from a seed.

    Args:
        policy: the policy.
        settings: those of an `AugmentationConfig`.
    """
    generator = torch.Generator()
    config = msgspec.convert(dict(settings), AugmentationConfig)
    prepare = augmented_batches(policy, config, generator)

    def seeded(observations: Sequence[Observation], seed: int) -> PrismaticBatch:
        # a seed for each batch: a resumed run augments the samples that are left as the first one
        # would have
        generator.manual_seed(seed)
        return prepare(observations)

    return seeded


def tiny_policy(
    head: Literal["tokens", "l1", "diffusion"], statistics: Mapping[str, Any] | None, seed: int
) -> "VlaPolicy":
    """Create a small OpenVLA-OFT with random weights.

    `statistics` as of `compute_statistics`, None for a range of -1 to 1.
    """
    config = tiny(head=head)
    if statistics is not None:
        found = msgspec.convert(dict(statistics), Statistics)
        config = msgspec.structs.replace(
            config,
            action_bounds=get_action_bounds(
                found, "bounds_q99", gripper=get_gripper(found, Extension()), epsilon=EPSILON
            ),
            proprio=get_proprio(found, "bounds_q99", "state", "zero"),
        )
    return (
        OpenVlaOft.create(config, seed)
        if head == "tokens"
        else ContinuousOpenVlaOft.create(config, seed)
    )


def with_statistics(folder: PublicFolder, statistics: Mapping[str, Any], key: str) -> PublicFolder:
    """Return a checkpoint folder with added action statistics.

    A policy loaded from it uses and saves them.

    Args:
        folder: the checkpoint's folder.
        statistics: statistics as `compute_statistics` returns them.
        key: their name in `dataset_statistics.json`, beside the old ones.
    """
    named = {**msgspec.json.decode(folder.files.get(STATISTICS_FILE, b"{}")), key: dict(statistics)}
    files = {
        **folder.files,
        STATISTICS_FILE: msgspec.json.format(msgspec.json.encode(named), indent=2),
    }
    found = msgspec.convert(dict(statistics), Statistics)
    extension = msgspec.structs.replace(
        folder.extension, norm_key=key, gripper=get_gripper(found, Extension()), epsilon=EPSILON
    )
    return replace(
        folder, files=files, extension=extension, statistics=folder.statistics.with_set(key, found)
    )


def _proprio_config(policy: "VlaPolicy") -> ProprioConfig | None:
    return None if isinstance(policy.config, OpenVlaConfig) else policy.config.proprio
