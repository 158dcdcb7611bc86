"""Vision-language policies: Qwen2.5-VL, Qwen3-VL and SmolVLM of transformers as language policies.

    image_0, image_1, ... ─► pixels ─► vision tower ─┐
    tokens ─► embeddings ◄─── for image tokens ───────┘─► trunk ─► hidden states, as of any language policy

Embeddings and rotary positions are made here and handed to the trunk, so rows may be padded, packed
or continued in a slot like those of text. A batch without images reads a blank one and ignores it:
learner ranks that share the tower's weights have to make the same collectives.
What differs from family to family is in its `ImageReader`. `load_language_model` loads a policy of
any kind, as its checkpoint says.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.chat_interface import ImagePrompt
from vla_rl.engines.device_lane import to_device
from vla_rl.models.language import checkpoint
from vla_rl.models.language.image_chat import ImageChatFormat
from vla_rl.models.language.images import (
    ImageFeatures,
    ImageItem,
    PreparedImages,
    PreparedPrompt,
)
from vla_rl.models.language.policy import CausalLanguageModel
from vla_rl.models.language.rows import Prompts, SlotKeyValues
from vla_rl.types import Observation, get_images


@dataclass(frozen=True)
class PromptsWithImages(Prompts):
    """Prompts of different lengths, and images of their conversations.

    Attributes:
        images: for each prompt the images that it and the turns after it show, or None.

    Example:
        Two prompts, the first of which shows images:

        PromptsWithImages(..., images=(PreparedImages(...), None))
    """

    images: tuple[PreparedImages | None, ...] = ()


class VisionLanguageModel(CausalLanguageModel):
    """A language policy that reads images.

    Args:
        network: `Qwen2_5_VLForConditionalGeneration` or another one whose images are read here.
        processor: its transformers processor, with tokenizer, image processor and chat template.
        files: the small files of its checkpoint.

    Raises: CheckpointError as `CausalLanguageModel` does.
    """

    reads_images = True

    def __init__(self, network: Any, processor: Any, files: Mapping[str, bytes]) -> None:
        self._processor = processor
        kind = checkpoint.IMAGE_READERS[network.config.model_type]
        self._reader = kind(processor, network.config)
        self._reader.adapt(network)
        super().__init__(network, processor.tokenizer, files)

    def copy(self) -> "VisionLanguageModel":
        """Return the same policy with its own copy of the weights."""
        return VisionLanguageModel(copy.deepcopy(self._network), self._processor, self._files)

    def freeze_vision(self) -> None:
        """Train the vision tower no longer, its merger included."""
        for tower in self._reader.get_towers(self._network):
            tower.requires_grad_(False)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The blocks of the vision tower, then the layers of the trunk."""
        return [*self._reader.get_tower_blocks(self._network), *self._trunk.layers]

    def num_image_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image, with those that only surround its parts."""
        return len(self._reader.size_tokens(height, width))

    @property
    def image_token(self) -> int:
        """The token that stands for a part of an image."""
        return self._reader.image_token

    def prepare_prompt(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> PreparedPrompt:
        """Prepare a rendered conversation with images.

        Raises: ValueError if the tokens are not those of a conversation with these images.
        """
        return self._reader.prepare_prompt(tokens, images)

    def split_images(self, prompt: ImagePrompt) -> list[ImageItem]:
        """Return each image of a prepared prompt by itself, for vLLM."""
        assert isinstance(prompt, PreparedPrompt)
        return self._reader.split_images(prompt.images)

    def prepare(self, observations: Sequence[Observation]) -> PromptsWithImages:
        """Return prompts and images.

        Raises: ValueError if `prompt_tokens` is missing, empty, or has unknown tokens, or for an
        array that is no image.
        """
        prompts = super().prepare(observations)
        images = tuple(self._prepare_images(observation) for observation in observations)
        given = {each.name: getattr(prompts, each.name) for each in fields(prompts)}
        return PromptsWithImages(**given, images=images)

    def extend(
        self,
        memory: SlotKeyValues,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        image_prompts: Sequence[ImagePrompt | None] = (),
    ) -> Tensor:
        """Return the logits float32 [B, V] of the token after each row's last."""
        if not image_prompts:
            return super().extend(memory, slots, starts, tokens)
        lengths = [len(row) for row in tokens]
        inputs = partial(self._continue_inputs, image_prompts, starts, lengths)
        return self._extend(memory, slots, starts, tokens, inputs)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return each parameter once, by the name that public checkpoints use; views, not copies."""
        own = checkpoint.distinct_tensors(self._network)
        return {self._reader.public_name(name): tensor for name, tensor in own.items()}

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the network; every name and shape has to match."""
        own = checkpoint.distinct_tensors(self._network)
        names = {self._reader.public_name(name): name for name in own}
        renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
        checkpoint.load_tensors(self._network, renamed)

    def _chat_format(self) -> ImageChatFormat:
        return ImageChatFormat(self._processor, self._stop_tokens, self._reader)

    @property
    def _trunk(self) -> Any:
        return self._reader.get_trunk(self._network)

    def _row_inputs(
        self, batch: Prompts, rows: Sequence[Tensor], lines: Tensor, starts: Sequence[int]
    ) -> dict[str, Any]:
        """Return embeddings and rotary positions of whole rows."""
        assert isinstance(batch, PromptsWithImages)
        positions = torch.zeros(self._reader.num_axes, lines.numel(), dtype=torch.long)
        feature_positions = []
        for row, start, images in zip(rows, starts, batch.images, strict=True):
            positions[:, start : start + len(row)] = self._reader.positions(len(row), images)
            feature_positions.append(start + self._reader.token_positions(images))
        images_read = [images for images in batch.images if images is not None]
        features = self._reader.embed_images(self._network, images_read or [self._reader.blank])
        embedded = self._embedded(lines)
        positions = positions.view(-1, *lines.shape)
        if images_read:
            return self._trunk_inputs(embedded, positions, torch.cat(feature_positions), features)
        # The blank image adds nothing, but its gradient goes through the tower: a rank without
        # images would otherwise miss the collectives that the others wait in.
        nothing = sum(0.0 * each.sum() for each in (features.embeddings, *features.deep))
        return self._trunk_inputs(embedded + nothing, positions)

    def _continue_inputs(
        self,
        image_prompts: Sequence[ImagePrompt | None],
        starts: Sequence[int],
        lengths: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
    ) -> dict[str, Any]:
        """Return embeddings and rotary positions of tokens that continue conversations."""
        rotary = positions.expand(self._reader.num_axes, -1, -1).clone()
        feature_positions, images_read, kept, num_features = [], [], [], 0
        for line, (prompt, start, length) in enumerate(
            zip(image_prompts, starts, lengths, strict=True)
        ):
            if prompt is None:
                continue
            assert isinstance(prompt, PreparedPrompt)
            rotary[:, line] = continue_positions(prompt.positions, positions[line])
            own = self._reader.token_positions(prompt.images)
            # A prompt may be read in pieces, so only the image tokens of this piece are placed.
            is_read = (own >= start) & (own < start + length)
            if is_read.any():
                feature_positions.append(line * tokens.shape[1] + own[is_read] - start)
                kept.append(num_features + is_read.nonzero()[:, 0])
                images_read.append(prompt.images)
                num_features += len(own)
        embedded = self._embedded(tokens)
        if not images_read:
            return self._trunk_inputs(embedded, rotary)
        features = self._reader.embed_images(self._network, images_read)
        chosen = to_device(torch.cat(kept), self._device)
        embeddings, deep = (
            features.embeddings[chosen],
            tuple(each[chosen] for each in features.deep),
        )
        return self._trunk_inputs(
            embedded, rotary, torch.cat(feature_positions), ImageFeatures(embeddings, deep)
        )

    def _trunk_inputs(
        self,
        embedded: Tensor,
        positions: Tensor,
        feature_positions: Tensor | None = None,
        features: ImageFeatures | None = None,
    ) -> dict[str, Any]:
        """Return the inputs of the trunk.

        Args:
            embedded: embedded tokens [B, W, D].
            positions: rotary positions int64 [axes, B, W], on the host.
            feature_positions: flattened positions of image tokens, int64 [M], ascending.
            features: their features.
        """
        rotary = to_device(positions if len(positions) > 1 else positions[0], self._device)
        inputs: dict[str, Any] = {"inputs_embeds": embedded, "position_ids": rotary}
        if feature_positions is None or features is None:
            return inputs
        inputs["inputs_embeds"] = insert_features(embedded, feature_positions, features.embeddings)
        if not features.deep:
            return inputs
        # the name is of a mask, and positions are what `ImageReader.adapt` makes of it
        inputs["visual_pos_masks"] = to_device(feature_positions, self._device)
        return {**inputs, "deepstack_visual_embeds": list(features.deep)}

    def _prepare_images(self, observation: Observation) -> PreparedImages | None:
        images = get_images(observation)
        if not images:
            return None
        return self._reader.prepare_images(
            images, [int(start) for start in observation["image_starts"]]
        )

    def _embedded(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._trunk.embed_tokens(to_device(tokens, self._device))
        return embedded


def continue_positions(prompt: Tensor, positions: Tensor) -> Tensor:
    """Return rotary positions int64 [axes, W] of tokens in a conversation: those of its prompt, int64
    [axes, P], and after it on from the largest.
    """
    length = prompt.shape[1]
    after = int(prompt.max()) + 1 + (positions - length)
    return torch.where(positions < length, prompt[:, positions.clamp(max=length - 1)], after)


def insert_features(embedded: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Return embeddings [B, W, D] with features [M, D] at flattened positions int64 [M]."""
    flat = embedded.flatten(0, 1)
    at = to_device(positions, embedded.device)
    return flat.index_copy(0, at, features.to(embedded.dtype)).view_as(embedded)


def load_language_model(
    source: str | Path, *, dtype: torch.dtype = torch.float32
) -> CausalLanguageModel:
    """Load a checkpoint from a local folder, or from the hub by its id, as the kind that its
    `config.json` names; safetensors only, and none of its code is run.

    Raises: CheckpointError naming what is missing or does not fit.
    """
    folder = checkpoint.local_folder(source)
    # Hub ids are resolved first: the kind stands in config.json, and a download happens once.
    kind = VisionLanguageModel if checkpoint.has_vision(folder) else CausalLanguageModel
    return kind.load(folder, dtype=dtype)
