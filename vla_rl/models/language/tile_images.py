"""Images of SmolVLM (Idefics3): square tiles, and the whole image as one more tile.

    300 x 500 pixels ─► resized ─► rows x columns of tiles, and one of the whole ─► tower, connector
    ─► as many image tokens for each tile, behind a mark of the tile's row and column

A tower has one size of tile, so there is no grid of patches, and rotary positions count on as those of
text (SmolVLM, arXiv:2504.05299; Idefics3, arXiv:2408.12637, section 4).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.device_lane import to_device
from vla_rl.errors import CheckpointError
from vla_rl.models.language.images import (
    ImageFeatures,
    ImageItem,
    ImageReader,
    PreparedImages,
    Shape,
    require_image,
)

BORDER: Final = "<fake_token_around_image>"
WHOLE: Final = "<global-img>"
"""Tokens before each tile and after the last one, and before that of the whole image."""


class TileReader(ImageReader):
    """Reads images for SmolVLM and Idefics3. Args: those of `ImageReader`.

    Raises: CheckpointError if the tiles of the processor are not those of the tower.
    """

    num_axes: ClassVar[int] = 1

    def __init__(self, processor: Any, config: Any) -> None:
        super().__init__(processor, config)
        self._tokenizer, self._mark = processor.tokenizer, processor.image_token
        self._side = int(self._vision.image_size)
        side = self._processor.max_image_size["longest_edge"]
        if side != self._side:
            raise CheckpointError(
                f"max_image_size of preprocessor_config.json is {side} pixels, and the vision tower "
                f"of config.json reads tiles of {self._side}; expected the same. Download the folder again"
            )
        num_patches = (self._side // int(self._vision.patch_size)) ** 2
        self._tile_tokens = num_patches // int(config.scale_factor) ** 2
        self._shapes: dict[Shape, Shape] = {}
        self._tokens: dict[Shape, np.ndarray] = {}
        self.blank = PreparedImages((), ((0, 0),), torch.zeros(1, 3, self._side, self._side))

    def size_tokens(self, height: int, width: int) -> np.ndarray:
        """Return the tokens of an image of that many pixels, int64 [n]."""
        size = height, width
        if size not in self._shapes:
            # Asked of the processor itself: its own arithmetic for sizes it has not seen rounds in
            # another order than its resizing.
            blank = np.zeros((height, width, 3), np.uint8)
            self._shapes[size] = self.prepare_images([blank], [0]).shapes[0]
        return self.shape_tokens(self._shapes[size])

    def shape_tokens(self, shape: Shape) -> np.ndarray:
        """Return the tokens of an image of that many tiles, int64 [n]."""
        if shape not in self._tokens:
            text = write_tiles(shape, self._mark * self._tile_tokens)
            self._tokens[shape] = np.array(
                self._tokenizer.encode(text, add_special_tokens=False), np.int64
            )
        return self._tokens[shape]

    def prepare_images(self, images: Sequence[np.ndarray], starts: Sequence[int]) -> PreparedImages:
        """Prepare the images of a conversation, given the position of each one's first token.

        Raises: ValueError for an array that is no image.
        """
        for image in images:
            require_image(image)
        found = self._processor(
            images=[list(images)],
            return_tensors="pt",
            input_data_format="channels_last",
            return_row_col_info=True,
        )
        shapes = zip(found["rows"][0], found["cols"][0], strict=True)
        return PreparedImages(
            starts=tuple(starts),
            shapes=tuple((int(rows), int(columns)) for rows, columns in shapes),
            pixels=found["pixel_values"][0],
        )

    def positions(self, length: int, images: PreparedImages | None) -> Tensor:
        """Return rotary positions of a conversation, int64 [1, L]."""
        del images
        return torch.arange(length)[None]

    def embed_images(self, network: Any, images: Sequence[PreparedImages]) -> ImageFeatures:
        """Return the features of all image tokens of at least one conversation, with a gradient."""
        tower = network.model.vision_model
        weight = next(tower.parameters())
        pixels = torch.cat([each.pixels for each in images]).to(weight.dtype)
        hidden = tower(pixel_values=to_device(pixels, weight.device)).last_hidden_state
        found: Tensor = network.model.connector(hidden)
        return ImageFeatures(found.flatten(0, 1))

    def get_trunk(self, network: Any) -> Any:
        """Return the part of the network from embedded tokens to hidden states."""
        return network.model.text_model

    def get_towers(self, network: Any) -> list[nn.Module]:
        """Return the parts of the network that only images go through."""
        return [network.model.vision_model, network.model.connector]

    def get_tower_blocks(self, network: Any) -> list[nn.Module]:
        """Return the blocks of the vision tower, from the first to the last."""
        return list(network.model.vision_model.encoder.layers)

    def adapt(self, network: Any) -> None:
        """Let the tower add positions that the host knows."""
        embeddings = network.model.vision_model.embeddings
        positions = find_positions(embeddings, self.blank.pixels)
        embeddings.forward = partial(embed_tiles, embeddings, positions)

    def split_images(self, images: PreparedImages) -> list[ImageItem]:
        """Return each image of a conversation by itself, for vLLM."""
        sizes = [rows * columns + 1 for rows, columns in images.shapes]
        return [
            ImageItem(
                is_part=self.shape_tokens(shape) == self.image_token,
                values={"num_patches": torch.tensor(size)},
                rows={
                    "pixel_values": tiles,
                    "pixel_attention_mask": torch.ones(size, self._side, self._side).bool(),
                },
            )
            for size, shape, tiles in zip(
                sizes, images.shapes, torch.split(images.pixels, sizes), strict=True
            )
        ]


def find_positions(embeddings: Any, tile: Tensor) -> Tensor:
    """Return the position of each patch of a whole tile, int64 [P], as transformers finds it."""
    seen: list[Tensor] = []
    table = embeddings.position_embedding
    hook = table.register_forward_pre_hook(lambda _, given: seen.append(given[0][0].cpu()))
    weight, side = table.weight, tile.shape[-1] // embeddings.patch_size
    try:
        with torch.no_grad():
            type(embeddings).forward(
                embeddings,
                pixel_values=tile.to(weight),
                patch_attention_mask=torch.ones(1, side, side, device=weight.device).bool(),
            )
    finally:
        hook.remove()
    return seen[0]


def embed_tiles(
    embeddings: Any, positions: Tensor, pixel_values: Tensor, patch_attention_mask: Tensor
) -> Tensor:
    """Embed the patches of whole tiles, [T, P, D].

    transformers' own method finds the positions anew for each tile, and asks the device which
    patches are padding; no tile has any.
    """
    del patch_attention_mask
    patches: Tensor = embeddings.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
    found: Tensor = embeddings.position_embedding(to_device(positions, patches.device))
    return patches + found


def write_tiles(shape: Shape, tile: str) -> str:
    """Return the text of an image: its tiles row by row, then the whole image.

    Args:
        shape: rows and columns of tiles; 0 and 0 for an image that is one tile itself.
        tile: the text of the parts of one tile.
    """
    rows = [
        "".join(f"{BORDER}<row_{row}_col_{column}>{tile}" for column in range(1, shape[1] + 1))
        for row in range(1, shape[0] + 1)
    ]
    return "".join(f"{row}\n" for row in rows) + "\n" * bool(rows) + BORDER + WHOLE + tile + BORDER
