"""Conversion of observations to a network's input: frames for the towers, text as ids, scaled
proprioception.

Runs off the event loop and off the device lane. Frames are processed on the network's device and
stay uint8 (`FusedVisionBackbone` converts them to floats), so that stored, queued and copied
batches are four times smaller.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Final

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from vla_rl.engines.device_lane import to_device
from vla_rl.errors import ConfigError
from vla_rl.models.images.pipeline import ImagePipeline, image_pipeline
from vla_rl.models.observed_values import describe_array, require_frame, require_instruction
from vla_rl.models.prismatic.config import PrismaticConfig, ProprioConfig
from vla_rl.types import Observation

_log = logging.getLogger(__name__)

PROMPT_CACHE_SIZE = 1024
"""Number of instructions whose token ids are cached; a run has a few hundred at most."""

NAME_CAMERAS: Final = "`cameras` in the policy's config names the images."


@dataclass(frozen=True)
class PrismaticBatch:
    """B observations, ready for the network.

    Attributes:
        images: uint8 [B, cameras, 3, S, S].
        prompts: int64 [B, P], right-padded; every row begins with BOS.
        prompt_lengths: int64 [B], number of ids in each row that are not padding.
        proprio: float32 [B, D] in [-1, 1], or None if the policy does not use it.
        is_padded: False if all prompts are equally long, so that attention needs no mask for
            padding; the host knows it without a look at the device.
        rows: int64 [N], the observation of each of N decisions, if some share one; None: B
            decisions, one each.

    Example:
        PrismaticBatch(images=[2, 1, 3, 224, 224], prompts=[2, 35], prompt_lengths=[35, 31],
            proprio=[2, 8])  # two decisions, one camera; the second prompt has 4 ids of padding
    """

    images: Tensor
    prompts: Tensor
    prompt_lengths: Tensor
    proprio: Tensor | None = None
    is_padded: bool = field(default=True, kw_only=True)
    rows: Tensor | None = field(default=None, kw_only=True)

    def to(self, device: torch.device) -> "PrismaticBatch":
        """Return the same batch on `device`."""
        return replace(
            self,
            images=to_device(self.images, device),
            prompts=to_device(self.prompts, device),
            prompt_lengths=to_device(self.prompt_lengths, device),
            proprio=None if self.proprio is None else to_device(self.proprio, device),
            rows=None if self.rows is None else to_device(self.rows, device),
        )

    def per_decision(self, values: Tensor) -> Tensor:
        """Return values of observations, [B, ...], for each decision: [N, ...]."""
        return values if self.rows is None else values[self.rows]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Its tensors, [B, ...] each; `PrismaticBatch(*columns)` is the same batch."""
        proprio = () if self.proprio is None else (self.proprio,)
        return self.images, self.prompts, self.prompt_lengths, *proprio

    def widened(self, multiple: int, pad_id: int) -> "PrismaticBatch":
        """Return the same rows with prompts padded to a multiple of a width, so that few widths
        occur.
        """
        prompts = nn.functional.pad(
            self.prompts, (0, -self.prompts.shape[1] % multiple), value=pad_id
        )
        return replace(self, prompts=prompts, is_padded=True)


def deduplicate(
    observations: Sequence[Observation], keys: Sequence[str]
) -> tuple[list[Observation], list[int]]:
    """Return the observations that differ in a key, and the index of each one's among them."""
    found: dict[tuple[object, ...], int] = {}
    chosen: list[Observation] = []
    rows: list[int] = []
    for observation in observations:
        values = [observation.get(key) for key in keys]
        identity = tuple(
            (value.tobytes(), value.shape) if isinstance(value, np.ndarray) else value
            for value in values
        )
        if identity not in found:
            found[identity] = len(chosen)
            chosen.append(observation)
        rows.append(found[identity])
    return chosen, rows


def format_prompt(instruction: str) -> str:
    """Return OpenVLA's question.

    The space at its end is the token that the first action is read from.
    """
    return f"In: What action should the robot take to {instruction.lower()}?\nOut: "


class PrismaticProcessor:
    """Turns observations into batches. Immutable, so any thread may use it.

    Args:
        config: the policy's configuration.
        tokenizer: the policy's tokenizer.
        proprio: scaling of proprioception; None for policies that do not use it.
        pipeline: image pipeline that replaces the policy's own, such as one with augmentation.
    """

    def __init__(
        self,
        config: PrismaticConfig,
        tokenizer: Tokenizer,
        proprio: ProprioConfig | None = None,
        pipeline: ImagePipeline | None = None,
    ) -> None:
        self._config, self._tokenizer, self._proprio_config = config, tokenizer, proprio
        self._pipeline = image_pipeline(config.images) if pipeline is None else pipeline
        # A run has a few hundred instructions, and each is asked for thousands of times.
        self._prompt_ids = lru_cache(maxsize=PROMPT_CACHE_SIZE)(self._encode_prompt)
        if proprio is not None:
            self._proprio_low = np.array(proprio.low)
            self._proprio_range = np.array(proprio.high) - self._proprio_low

    def prepare(self, observations: Sequence[Observation], device: torch.device) -> PrismaticBatch:
        """Prepare one row for each observation, on `device`.

        Raises: ValueError naming the key if a frame or state has an unexpected shape or dtype.
        """
        prompts = [
            self._prompt_ids(require_instruction(observation)) for observation in observations
        ]
        lengths = [len(ids) for ids in prompts]
        padded = np.full(
            (len(prompts), max(lengths)), self._config.llm.pad_token_id, dtype=np.int64
        )
        for row, ids in enumerate(prompts):
            padded[row, : len(ids)] = ids
        return PrismaticBatch(
            images=self._images(observations, device),
            prompts=to_device(torch.from_numpy(padded), device),
            prompt_lengths=to_device(torch.tensor(lengths, dtype=torch.int64), device),
            proprio=self._proprio(observations, device),
            is_padded=min(lengths) < max(lengths),
        )

    def _encode_prompt(self, instruction: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(format_prompt(instruction)).ids)

    def _images(self, observations: Sequence[Observation], device: torch.device) -> Tensor:
        cameras = [self._camera(observations, key, device) for key in self._config.cameras]
        return torch.stack(cameras, dim=1)

    def _camera(
        self, observations: Sequence[Observation], key: str, device: torch.device
    ) -> Tensor:
        """Return uint8 [B, 3, S, S]; frames of one size are processed together."""
        frames = [require_frame(observation, key, NAME_CAMERAS) for observation in observations]
        # Frames of one size are one batch; mixed sizes are rare, and correct one by one.
        if len({frame.shape for frame in frames}) > 1:
            return torch.cat([self._process(frame[None], device) for frame in frames])
        return self._process(np.stack(frames), device)

    def _process(self, frames: np.ndarray, device: torch.device) -> Tensor:
        # a view with channels second, laid out channels last: the fast path of the resize on CPUs
        if min(frames.shape[1:3]) < self._config.image_size:
            _warn_enlarged(frames.shape[1], frames.shape[2], self._config.image_size)
        images = to_device(torch.from_numpy(frames), device).permute(0, 3, 1, 2)
        return self._pipeline(images, self._config.image_size)

    def _proprio(self, observations: Sequence[Observation], device: torch.device) -> Tensor | None:
        if self._proprio_config is None:
            return None
        key, width = self._proprio_config.key, len(self._proprio_config.low)
        rows = np.stack([_vector(observation, key, width) for observation in observations]).astype(
            np.float64
        )
        is_zero = (self._proprio_range == 0.0) & (self._proprio_config.constant == "zero")
        # 1e-8 is what the projects' evaluation adds; it decides where a constant dimension goes.
        unit = np.where(
            is_zero, 0.0, 2.0 * (rows - self._proprio_low) / (self._proprio_range + 1e-8) - 1.0
        )
        return to_device(torch.from_numpy(np.clip(unit, -1.0, 1.0).astype(np.float32)), device)


@cache
def _warn_enlarged(height: int, width: int, wanted: int) -> None:
    """Warn about enlarged frames, once for each size."""
    _log.warning(
        "frames of %d x %d pixels are enlarged to %d x %d, so the policy sees blurred images; "
        "render larger ones unless it was trained with these.",
        height, width, wanted, wanted,
    )  # fmt: skip


def _vector(observation: Observation, key: str, width: int) -> np.ndarray:
    vector = observation.get(key)
    if not isinstance(vector, np.ndarray) or vector.shape != (width,):
        raise ValueError(
            f"observation[{key!r}] is {describe_array(vector)}, expected float32 [{width}]; "
            f"`proprio` in the policy's config sets the key and the number of dimensions."
        )
    return vector


BOS_ID: Final = 1
"""First token of every prompt."""


def read_tokenizer(config: PrismaticConfig) -> Tokenizer:
    """Read a policy's tokenizer.

    Raises: ConfigError if its file is not a tokenizer, or does not fit the policy's tokens.
    """
    file, llm = config.tokenizer_file, config.llm
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the tokenizers library has no narrower exception
        raise ConfigError(
            f"tokenizer_file is {file!r}, expected a tokenizer.json: {error}"
        ) from error
    # A public tokenizer.json may pad or cut by itself, which would change prompts of certain
    # lengths.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # the public ones hold the padding token too, the first id after the vocabulary
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > llm.pad_token_id:
        raise ConfigError(
            f"tokenizer_file is {file!r}, which has ids up to {largest}, expected none beyond "
            f"{llm.pad_token_id}: {llm.vocab_size} tokens, of which the last are actions, and one "
            "for padding. It belongs to another policy."
        )
    if tokenizer.encode("").ids[:1] != [BOS_ID]:
        raise ConfigError(
            f"tokenizer_file is {file!r}, whose prompts do not begin with <s> (id {BOS_ID}), "
            "expected one that adds it."
        )
    return tokenizer
