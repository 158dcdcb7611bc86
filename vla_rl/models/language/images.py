"""Images of conversations, in the form that a vision-language network reads.

    Message(images=(a,), content="Which colour?") ─► marks of <image>, Which colour? ─► tokens
    uint8 [H, W, 3] ─► image processor ─► pixels, shapes ─► vision tower ─► one embedding for each image token
    tokens, shapes ─► rotary positions, int64 [axes, L]

`ImageReader` has what all families share; `grid_images` and `tile_images` have their differences. All
that follows from the shapes of images is computed here, on the host: a network that asked its
tensors on a GPU would wait for it in every block.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Shape: TypeAlias = tuple[int, int]
"""Rows and columns of an image's patches, or of its tiles."""

COMPARED_BITS: Final = 62
"""Bits of an image's digest that stand for its tokens where prompts are compared."""


@dataclass(frozen=True)
class PreparedImages:
    """The images of one conversation, as the network reads them.

    Example:
        PreparedImages(starts=(4,), shapes=((8, 8),), pixels=[64, 1176], plan={"rotary": [64, 2]})
        # one image of 112 x 112 pixels, of which the trunk reads 16 tokens
    """

    starts: tuple[int, ...]
    """Position of each image's first token in the conversation."""

    shapes: tuple[Shape, ...]

    pixels: Tensor
    """float32 [N, ...]: the patches or tiles of all images, end to end."""

    plan: Mapping[str, Any] = field(default_factory=dict)
    """Other inputs of the tower, which follow from the shapes: tensors, such as positions of patches,
    and tuples of numbers."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with images.

    Attributes:
        images: the images.
        positions: rotary positions of all tokens, int64 [axes, P].
        compared: tokens int64 [P], with a negative number of its own for each image.
    """

    images: PreparedImages
    positions: Tensor
    compared: np.ndarray

    @property
    def image_starts(self) -> np.ndarray:
        """Position of each image's first token, int64 [n]."""
        return np.array(self.images.starts, np.int64)


class ImageFeatures(NamedTuple):
    """Features of image tokens.

    Example:
        ImageFeatures(embeddings=tensor of [16, 64], deep=(tensor of [16, 64],))
    """

    embeddings: Tensor
    """Embeddings of the image tokens, [M, D]."""

    deep: tuple[Tensor, ...] = ()
    """Features that are added to the outputs of the trunk's first layers, [M, D] each (DeepStack,
    arXiv:2406.04334)."""


class ImageItem(NamedTuple):
    """One image, in the form that vLLM's class of the same network reads.

    Example:
        ImageItem(is_part=np.ones(16, bool), values={"image_grid_thw": tensor([1, 8, 8])},
            rows={"pixel_values": tensor of [64, 1176]})
    """

    is_part: np.ndarray
    """bool [n]: which of the image's tokens stand for a part of it."""

    values: Mapping[str, Tensor]
    """Tensors of the whole image."""

    rows: Mapping[str, Tensor]
    """Tensors with a row for each patch or tile."""


class ImageReader(ABC):
    """Turns images into pixels, tokens and positions, as one checkpoint wants them.

    Args:
        processor: transformers' processor of the checkpoint.
        config: the network's configuration.

    Attributes:
        image_token: the token that stands for a part of an image.
        blank: the smallest image, all zero, that no conversation shows.
    """

    num_axes: ClassVar[int]
    """Rotary positions that each token has."""

    blank: PreparedImages

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor, self._vision = processor.image_processor, config.vision_config
        self.image_token = int(config.image_token_id)

    @abstractmethod
    def size_tokens(self, height: int, width: int) -> np.ndarray:
        """Return the tokens of an image of that many pixels, int64 [n]."""

    @abstractmethod
    def shape_tokens(self, shape: Shape) -> np.ndarray:
        """Return the tokens of an image of that many patches or tiles, int64 [n]."""

    @abstractmethod
    def prepare_images(self, images: Sequence[np.ndarray], starts: Sequence[int]) -> PreparedImages:
        """Prepare the images of a conversation, given the position of each one's first token.

        Raises: ValueError for an array that is no image.
        """

    @abstractmethod
    def positions(self, length: int, images: PreparedImages | None) -> Tensor:
        """Return rotary positions of a conversation, int64 [axes, L]."""

    @abstractmethod
    def embed_images(self, network: Any, images: Sequence[PreparedImages]) -> ImageFeatures:
        """Return the features of all image tokens of at least one conversation, with a gradient."""

    @abstractmethod
    def get_trunk(self, network: Any) -> Any:
        """Return the part of the network from embedded tokens to hidden states."""

    @abstractmethod
    def get_towers(self, network: Any) -> list[nn.Module]:
        """Return the parts of the network that only images go through."""

    @abstractmethod
    def get_tower_blocks(self, network: Any) -> list[nn.Module]:
        """Return the blocks of the vision tower, from the first to the last."""

    @abstractmethod
    def split_images(self, images: PreparedImages) -> list[ImageItem]:
        """Return each image of a conversation by itself, for vLLM."""

    def adapt(self, network: Any) -> None:
        """Replace methods of the network that would ask its device for what the host knows."""
        del network

    def public_name(self, name: str) -> str:
        """Return the name that public checkpoints give a tensor of the network."""
        return name

    def prepare_prompt(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> PreparedPrompt:
        """Prepare a rendered prompt with images. Raises: ValueError if they do not fit."""
        for image in images:
            require_image(image)
        # Token counts are the host's own arithmetic, so no prompt waits for the vision tower.
        expected = [self.size_tokens(*image.shape[:2]) for image in images]
        positions = np.flatnonzero(tokens == self.image_token)
        lengths = [int((each == self.image_token).sum()) for each in expected]
        if len(positions) != sum(lengths):
            raise ValueError(
                f"the prompt has {len(positions)} image tokens, expected {sum(lengths)} for its "
                f"{len(images)} images; take the tokens that this policy's `render` returns"
            )
        firsts = positions[np.cumsum(lengths) - lengths]
        # an image may begin with a token of its own kind before the first that stands for a part
        starts = [
            int(first) - int((each == self.image_token).argmax())
            for first, each in zip(firsts, expected, strict=True)
        ]
        for number, (start, each) in enumerate(zip(starts, expected, strict=True)):
            if start < 0 or not np.array_equal(tokens[start : start + len(each)], each):
                raise ValueError(
                    f"the tokens of image {number} are not those of an image of "
                    f"{images[number].shape[0]} x {images[number].shape[1]} pixels; take the tokens "
                    "that this policy's `render` returns"
                )
        prepared = self.prepare_images(images, starts)
        compared = tokens.copy()
        compared[positions] = np.repeat([-hash_image(image) for image in images], lengths)
        return PreparedPrompt(prepared, self.positions(len(tokens), prepared), compared)

    def token_positions(self, images: PreparedImages | None) -> Tensor:
        """Return the positions of all image tokens in their conversation, int64 [M]."""
        parts = [torch.zeros(0, dtype=torch.long)]
        if images is not None:
            for start, shape in zip(images.starts, images.shapes, strict=True):
                is_part = self.shape_tokens(shape) == self.image_token
                parts.append(start + torch.from_numpy(np.flatnonzero(is_part)))
        return torch.cat(parts)


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
