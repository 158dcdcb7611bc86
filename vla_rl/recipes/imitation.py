"""Between a data set and an imitator: samples read on demand, augmented batches, and statistics put into a policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from vla_rl.data import RecordedEpisode
from vla_rl.engines.imitation import Demonstration
from vla_rl.models.images.augmentation import AugmentationConfig, training_pipeline
from vla_rl.models.openvla import OpenVla, OpenVlaConfig
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.models.openvla_oft.checkpoint import EPSILON
from vla_rl.models.prismatic.config import ProprioConfig
from vla_rl.models.prismatic.folder import open_folder
from vla_rl.models.prismatic.processor import PrismaticBatch, PrismaticProcessor
from vla_rl.models.prismatic.saving import read_tokenizer
from vla_rl.models.prismatic.statistics import STATISTICS_FILE, Statistics, bounds_of, proprio_of
from vla_rl.types import Observation

if TYPE_CHECKING:
    from vla_rl.recipes.checkpoints import VlaPolicy


class Samples:
    """Every control step of every episode as one sample: what was seen, and the chunk from there on.

    Frames are read when a sample is asked for. Chunks that reach over the end are marked as shorter.
    """

    def __init__(self, episodes: Sequence[RecordedEpisode], policy: "VlaPolicy") -> None:
        self._episodes = tuple(episodes)
        self._chunk_size, self._cameras = policy.config.chunk_size, policy.config.cameras
        self._ends = np.cumsum([episode.num_steps for episode in episodes])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def demonstrations(self, indices: Sequence[int]) -> list[Demonstration]:
        """The samples of these numbers; blocks while frames are read. Raises: DataError naming a frame that is damaged."""
        return [self._demonstration(index) for index in indices]

    def _demonstration(self, index: int) -> Demonstration:
        number = int(np.searchsorted(self._ends, index, side="right"))
        episode = self._episodes[number]
        step = index - int(self._ends[number]) + episode.num_steps
        rest = episode.actions[step : step + self._chunk_size]
        chunk = np.zeros((self._chunk_size, episode.actions.shape[1]), np.float32)
        chunk[: len(rest)] = rest
        return Demonstration(observation=episode.observation(step, self._cameras), actions=chunk, num_valid=len(rest))


def augmented_batches(
    policy: "VlaPolicy", config: AugmentationConfig, generator: torch.Generator
) -> Callable[[Sequence[Observation]], PrismaticBatch]:
    """What `policy.prepare` does, with augmented frames; for one thread, as all batches draw from `generator`."""
    pipeline = training_pipeline(policy.config.images, config, generator)
    tokenizer = read_tokenizer(policy.config.tokenizer_file)
    processor = PrismaticProcessor(policy.config, tokenizer, _proprio_config(policy), pipeline)
    device = next(policy.network.parameters()).device
    return lambda observations: processor.prepare(observations, device)


def tiny_policy(
    head: Literal["tokens", "l1", "diffusion"], statistics: Mapping[str, Any] | None, seed: int
) -> "VlaPolicy":
    """A small OpenVLA-OFT with random weights; `statistics` as `statistics_of` gives them, none for -1 to 1."""
    config = tiny(head=head)
    if statistics is not None:
        found = msgspec.convert(dict(statistics), Statistics)
        config = msgspec.structs.replace(
            config,
            action_bounds=bounds_of(found, "bounds_q99", gripper="openvla", epsilon=EPSILON),
            proprio=proprio_of(found, "bounds_q99", "state"),
        )
    return OpenVlaOft.create(config, seed) if head == "tokens" else ContinuousOpenVlaOft.create(config, seed)


def with_statistics(policy: "VlaPolicy", statistics: Mapping[str, Any], key: str) -> "VlaPolicy":
    """The same loaded policy (not a copy) with other action statistics, which `save` writes beside the ones it had.

    Args:
        policy: as a checkpoint was loaded.
        statistics: as `statistics_of` gives them.
        key: what they are called in `dataset_statistics.json`.
    """
    origin = open_folder(str(policy.config.tokenizer_file).rpartition("/")[0])
    named = {**msgspec.json.decode(origin.files.get(STATISTICS_FILE, b"{}")), key: dict(statistics)}
    files = {**origin.files, STATISTICS_FILE: msgspec.json.format(msgspec.json.encode(named), indent=2)}
    found = msgspec.convert(dict(statistics), Statistics)
    origin = replace(origin, files=files, statistics={**origin.statistics, key: found})
    epsilon = 0.0 if isinstance(policy, OpenVla) else EPSILON
    bounds = bounds_of(found, "bounds_q99", gripper="openvla", epsilon=epsilon)
    tokenizer = read_tokenizer(policy.config.tokenizer_file)
    if isinstance(policy, OpenVla):
        config = msgspec.structs.replace(policy.config, action_bounds=bounds, norm_key=key, normalization="bounds_q99")
        return OpenVla(config, policy.network, tokenizer, origin)
    proprio = policy.config.proprio
    if proprio is not None:
        proprio = proprio_of(found, "bounds_q99", proprio.key)
    oft = msgspec.structs.replace(
        policy.config, action_bounds=bounds, norm_key=key, normalization="bounds_q99", proprio=proprio
    )
    return type(policy)(oft, policy.network, tokenizer, origin)


def _proprio_config(policy: "VlaPolicy") -> ProprioConfig | None:
    return None if isinstance(policy.config, OpenVlaConfig) else policy.config.proprio
