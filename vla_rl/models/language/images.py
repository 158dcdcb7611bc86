"""Images of conversations for networks of the Qwen2.5-VL class.

    Message(images=(a,), content="Which colour?") ─► <image>Which colour? ─► the image token, n times, then text
    uint8 [H, W, 3] ─► image processor ─► patches, grid ─► vision tower ─► one embedding for each image token
    tokens, grids ─► rotary positions in time, rows and columns, int64 [3, L]

All that follows from the grids is computed here, on the host: which patches a window of the tower
holds, and where a token is. A network that asked its tensors on a GPU would wait for it in every
block.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from vla_rl.engines.device_lane import to_device
from vla_rl.errors import ConversationRejected
from vla_rl.models.language.chat_format import ChatFormat
from vla_rl.types import Message, ToolSpec

Grid: TypeAlias = tuple[int, int]
"""Rows and columns of an image's patches."""

COMPARED_BITS: Final = 62
"""Bits of an image's digest that stand for its tokens where prompts are compared."""


@dataclass(frozen=True)
class PreparedImages:
    """The images of one conversation, as the network reads them.

    Example:
        PreparedImages(starts=(4,), grids=((8, 8),), patches=[64, 1176], rotary=[64, 2], order=[16],
            windows=(64,))  # one image of 112 x 112 pixels, of which the trunk reads 16 tokens
    """

    starts: tuple[int, ...]
    """Position of each image's first token in the conversation."""

    grids: tuple[Grid, ...]

    patches: Tensor
    """float32 [N, C], the patches of all images, end to end."""

    rotary: Tensor
    """Row and column of each patch, int64 [N, 2]."""

    order: Tensor
    """Merged patches in the order of the tower's windows, int64 [M]."""

    windows: tuple[int, ...]
    """Patches of each window."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with images.

    Attributes:
        images: the images.
        positions: rotary positions of all tokens, int64 [3, P].
        compared: tokens int64 [P], with a negative number of its own for each image.
    """

    images: PreparedImages
    positions: Tensor
    compared: np.ndarray

    @property
    def image_starts(self) -> np.ndarray:
        """Position of each image's first token, int64 [n]."""
        return np.array(self.images.starts, np.int64)


class ImageReader:
    """Turns images into patches and token positions, as one checkpoint wants them.

    Args:
        image_processor: transformers' image processor of the checkpoint.
        config: the network's configuration.

    Attributes:
        image_token: the token that stands for a part of an image.
        blank: the smallest image, all zero, that no conversation shows.
    """

    def __init__(self, image_processor: Any, config: Any) -> None:
        self._processor, self._vision = image_processor, config.vision_config
        self.image_token = int(config.image_token_id)
        self._merge = int(self._vision.spatial_merge_size)
        vision, side = self._vision, self._merge
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        # now, and not when it is needed first: that may be in an estimate, on tensors without numbers
        self.blank = self._of_patches(
            torch.zeros(side**2, width), torch.tensor([[1, side, side]]), ()
        )

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image."""
        num_patches = self._processor.get_number_of_image_patches(height, width)
        return int(num_patches) // self._merge**2

    def prepare_images(self, images: Sequence[np.ndarray], starts: Sequence[int]) -> PreparedImages:
        """Prepare the images of a conversation, given the position of each one's first token.

        Raises: ValueError for an array that is no image.
        """
        for image in images:
            require_image(image)
        found = self._processor(
            images=list(images), return_tensors="pt", input_data_format="channels_last"
        )
        return self._of_patches(found["pixel_values"], found["image_grid_thw"], starts)

    def prepare_prompt(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> PreparedPrompt:
        """Prepare a rendered prompt with images. Raises: ValueError if they do not fit."""
        for image in images:
            require_image(image)
        token_positions = np.flatnonzero(tokens == self.image_token)
        lengths = [self.num_tokens(*image.shape[:2]) for image in images]
        if len(token_positions) != sum(lengths):
            raise ValueError(
                f"the prompt has {len(token_positions)} image tokens, expected {sum(lengths)} for its "
                f"{len(images)} images; take the tokens that this policy's `render` returns"
            )
        # Token counts are the host's own arithmetic, so no prompt waits for the vision tower.
        ends = np.cumsum(lengths)
        prepared = self.prepare_images(images, token_positions[ends - lengths].tolist())
        compared = tokens.copy()
        compared[token_positions] = np.repeat([-hash_image(image) for image in images], lengths)
        return PreparedPrompt(prepared, self.positions(len(tokens), prepared), compared)

    def token_positions(self, images: PreparedImages | None) -> Tensor:
        """Return the positions of all image tokens in their conversation, int64 [M]."""
        parts = [torch.zeros(0, dtype=torch.long)]
        if images is not None:
            for start, (rows, columns) in zip(images.starts, images.grids, strict=True):
                parts.append(start + torch.arange(rows * columns // self._merge**2))
        return torch.cat(parts)

    def positions(self, length: int, images: PreparedImages | None) -> Tensor:
        """Return rotary positions of a conversation, int64 [3, L]: those of text count on, in all
        three; an image counts by its larger side.
        """
        parts, end, position = [], 0, 0
        for start, (rows, columns) in (
            zip(images.starts, images.grids, strict=True) if images else ()
        ):
            parts.append((position + torch.arange(start - end)).expand(3, -1))
            position += start - end
            height, width = rows // self._merge, columns // self._merge
            grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            parts.append(position + torch.stack([torch.zeros_like(grid[0]), *grid]).flatten(1))
            position += max(height, width)
            end = start + height * width
        parts.append((position + torch.arange(length - end)).expand(3, -1))
        return torch.cat(parts, dim=1)

    def embed_images(self, tower: Any, images: Sequence[PreparedImages]) -> Tensor:
        """Return the embeddings of all image tokens [M, D], with a gradient.

        Args:
            tower: the vision tower.
            images: the images of at least one conversation.
        """
        weight = next(tower.parameters())
        patches = torch.cat([each.patches for each in images]).to(weight.dtype)
        before, orders = 0, []
        for each in images:
            orders.append(before + each.order)
            before += len(each.order)
        wholes = [rows * columns for each in images for rows, columns in each.grids]
        windows = [length for each in images for length in each.windows]
        found: Tensor = tower(
            to_device(patches, weight.device),
            grid_thw=None,
            position_ids=to_device(torch.cat([each.rotary for each in images]), weight.device),
            window_index=to_device(torch.cat(orders), weight.device),
            # as NumPy: the tower asks for their numbers in every block, for which a GPU would wait
            cu_seqlens=np.cumsum([0, *wholes]),
            cu_window_seqlens=np.cumsum([0, *windows]),
        ).pooler_output
        return found

    def _of_patches(self, patches: Tensor, grids: Tensor, starts: Sequence[int]) -> PreparedImages:
        vision = self._vision
        order, windows = get_vision_window_index(
            grids, self._merge, vision.window_size, vision.patch_size
        )
        return PreparedImages(
            starts=tuple(starts),
            grids=tuple((rows, columns) for _, rows, columns in grids.tolist()),
            patches=patches,
            rotary=get_vision_position_ids(grids, self._merge),
            order=order,
            windows=tuple(windows.diff().tolist()),
        )


def require_image(image: Any) -> None:
    """Raise ValueError unless this is an image."""
    is_image = isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3
    if not is_image or image.dtype != np.uint8 or 0 in image.shape:
        what = (
            f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image)
        )
        raise ValueError(f"an image is {what}, expected a NumPy array uint8 [H, W, 3]")


def hash_image(image: np.ndarray) -> int:
    """Return a number above 0 that no other image has, up to chance."""
    digest = hashlib.blake2b(str(image.shape).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(image).data)
    return (int.from_bytes(digest.digest(), "little") >> (64 - COMPARED_BITS)) + 1


class ImageChatFormat(ChatFormat):
    """The chat template of one processor.

    Args:
        processor: a transformers processor with tokenizer and chat template.
        stop_tokens: tokens that end a reply.
        reader: knows how many tokens an image has.

    Raises: CheckpointError for a processor without a chat template.
    """

    def __init__(self, processor: Any, stop_tokens: frozenset[int], reader: ImageReader) -> None:
        super().__init__(processor.tokenizer, stop_tokens, processor.chat_template)
        self._reader = reader
        self._image_mark: str = processor.image_token
        self._marks = (processor.image_token, processor.video_token)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> np.ndarray:
        """Render the prompt of the next reply, int64 [P].

        Raises: ValueError if the template rejects the conversation.
        """
        return self._locate(messages, self.render_text(messages, tools, add_generation_prompt=True))

    def render_whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Render a conversation up to the end of its last message, int64 [P]."""
        return self._locate(
            messages, self.render_text(messages, tools, add_generation_prompt=False)
        )

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, add_generation_prompt: bool
    ) -> str:
        """Render a conversation as text, with one mark for each image.

        Raises: ValueError if the template rejects it, or describes no tools although there are some.
        """
        if tools and "tools" not in (self._choose_template(tools) or ""):
            raise ValueError(
                f"the conversation has {len(tools)} tools, but the chat template describes none to "
                "the policy; put a chat_template.jinja with tools beside the checkpoint's files"
            )
        return super().render_text(messages, tools, add_generation_prompt=add_generation_prompt)

    def tokenize(self, text: str) -> np.ndarray:
        """Tokenize plain text, int64 [P]; marks of images in it are text too."""
        return super().tokenize(self._harmless(text))

    def _given(self, message: Message) -> dict[str, Any]:
        # Every text is made harmless, tool results included: any of them may hold the letters of
        # a mark.
        given: dict[str, Any] = self._harmless(super()._given(message))
        if message.images:
            parts = [{"type": "image"} for _ in message.images]
            given["content"] = [*parts, {"type": "text", "text": given["content"]}]
        return given

    def _harmless(self, value: Any) -> Any:
        """Return plain values in which no text is a mark of an image."""
        if isinstance(value, dict):
            return {self._harmless(key): self._harmless(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._harmless(each) for each in value]
        if isinstance(value, str):
            for mark in self._marks:
                # a policy may write the mark's letters in a reply, and each mark has to be an image
                value = value.replace(mark, f"{mark[:1]} {mark[1:]}")
        return value

    def _locate(self, messages: Sequence[Message], text: str) -> np.ndarray:
        """Tokenize a rendered conversation, with all tokens of its images.

        Raises: ConversationRejected if it has other marks of images than one for each.
        """
        images = [image for message in messages for image in message.images]
        for image in images:
            require_image(image)
        num_marks = text.count(self._image_mark)
        if num_marks != len(images):
            # a template that cuts thoughts out may join a mark of what was around them
            bare = [msgspec.structs.replace(message, images=()) for message in messages]
            text_without = self.render_text(bare, (), add_generation_prompt=False)
            raise ConversationRejected(
                f"the chat template rendered {num_marks} images of {len(images)}; expected one mark "
                f"{self._image_mark!r} for each. Does it show images of this role?",
                is_reply_at_fault=self._image_mark in text_without,
            )
        if not images:
            return self._tokens(text)
        # special tokens divide a text before anything else does, so its parts can be tokenized apart
        first, *rest = (self._tokens(part) for part in text.split(self._image_mark))
        parts = [first]
        for image, after in zip(images, rest, strict=True):
            num_tokens = self._reader.num_tokens(*image.shape[:2])
            parts += [np.full(num_tokens, self._reader.image_token, np.int64), after]
        return np.concatenate(parts)
