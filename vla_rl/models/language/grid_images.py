"""Images of Qwen2.5-VL and Qwen3-VL: a grid of patches, of which each square becomes a token.

    112 x 112 pixels ─► 8 x 8 patches ─► tower ─► 4 x 4 merged ─► 16 image tokens

Rotary positions have three axes: time, rows and columns (M-RoPE, arXiv:2409.12191, section 2.1).
Qwen2.5-VL's tower attends within windows in most of its blocks. Qwen3-VL's has learned positions,
and hands the outputs of some of its blocks to the trunk's first layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from vla_rl.engines.device_lane import to_device
from vla_rl.models.language.images import (
    ImageFeatures,
    ImageItem,
    ImageReader,
    PreparedImages,
    Shape,
    require_image,
)

WINDOWED: Final = "qwen2_5_vl"
"""Model type whose tower attends within windows."""

PUBLIC_PREFIXES: Final = {"model.language_model.": "model.", "model.visual.": "visual."}
"""transformers' names of Qwen2.5-VL's parts, and those of its public checkpoints. Qwen3-VL's are
published as transformers names them."""


class GridReader(ImageReader):
    """Reads images for Qwen2.5-VL and Qwen3-VL. Args: those of `ImageReader`."""

    num_axes: ClassVar[int] = 3

    def __init__(self, processor: Any, config: Any) -> None:
        super().__init__(processor, config)
        self._has_windows = config.model_type == WINDOWED
        self._merge = int(self._vision.spatial_merge_size)
        vision, side = self._vision, self._merge
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        # now, and not when it is needed first: that may be in an estimate, on tensors without numbers
        self.blank = self._from_patches(
            torch.zeros(side**2, width), torch.tensor([[1, side, side]]), ()
        )

    def size_tokens(self, height: int, width: int) -> np.ndarray:
        """Return the tokens of an image of that many pixels, int64 [n]."""
        num_patches = int(self._processor.get_number_of_image_patches(height, width))
        return np.full(num_patches // self._merge**2, self.image_token, np.int64)

    def shape_tokens(self, shape: Shape) -> np.ndarray:
        """Return the tokens of an image of that many patches, int64 [n]."""
        return np.full(shape[0] * shape[1] // self._merge**2, self.image_token, np.int64)

    def prepare_images(self, images: Sequence[np.ndarray], starts: Sequence[int]) -> PreparedImages:
        """Prepare the images of a conversation, given the position of each one's first token.

        Raises: ValueError for an array that is no image.
        """
        for image in images:
            require_image(image)
        found = self._processor(
            images=list(images), return_tensors="pt", input_data_format="channels_last"
        )
        return self._from_patches(found["pixel_values"], found["image_grid_thw"], starts)

    def positions(self, length: int, images: PreparedImages | None) -> Tensor:
        """Return rotary positions of a conversation, int64 [3, L]: those of text count on, in all
        three; an image counts by its larger side.
        """
        parts, end, position = [], 0, 0
        for start, (rows, columns) in (
            zip(images.starts, images.shapes, strict=True) if images else ()
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

    def embed_images(self, network: Any, images: Sequence[PreparedImages]) -> ImageFeatures:
        """Return the features of all image tokens of at least one conversation, with a gradient."""
        tower = network.model.visual
        weight = next(tower.parameters())
        pixels = torch.cat([each.pixels for each in images]).to(weight.dtype)
        sizes = [rows * columns for each in images for rows, columns in each.shapes]
        found = tower(
            to_device(pixels, weight.device),
            grid_thw=None,
            position_ids=_join("rotary", images, weight.device),
            # as NumPy: the tower asks for their numbers in every block, for which a GPU would wait
            cu_seqlens=np.cumsum([0, *sizes]),
            **self._tower_inputs(images, weight.device),
        )
        return ImageFeatures(found.pooler_output, tuple(getattr(found, "deepstack_features", ())))

    def get_trunk(self, network: Any) -> Any:
        """Return the part of the network from embedded tokens to hidden states."""
        return network.model.language_model

    def get_towers(self, network: Any) -> list[nn.Module]:
        """Return the parts of the network that only images go through."""
        return [network.model.visual]

    def get_tower_blocks(self, network: Any) -> list[nn.Module]:
        """Return the blocks of the vision tower, from the first to the last."""
        return list(network.model.visual.blocks)

    def split_images(self, images: PreparedImages) -> list[ImageItem]:
        """Return each image of a conversation by itself, for vLLM."""
        sizes = [rows * columns for rows, columns in images.shapes]
        return [
            ImageItem(
                is_part=np.ones(size // self._merge**2, np.bool_),
                values={"image_grid_thw": torch.tensor([1, *shape])},
                rows={"pixel_values": patches},
            )
            for size, shape, patches in zip(
                sizes, images.shapes, torch.split(images.pixels, sizes), strict=True
            )
        ]

    def adapt(self, network: Any) -> None:
        """Let the trunk add deep features at positions that the host knows."""
        if not self._has_windows:
            network.model.language_model._deepstack_process = add_deep_features

    def public_name(self, name: str) -> str:
        """Return the name that public checkpoints give a tensor of the network."""
        for own, public in PUBLIC_PREFIXES.items() if self._has_windows else ():
            if name.startswith(own):
                return public + name.removeprefix(own)
        return name

    def _tower_inputs(
        self, images: Sequence[PreparedImages], device: torch.device
    ) -> Mapping[str, Any]:
        """Return the inputs that only one of the two towers has."""
        if not self._has_windows:
            # joined as they are: an index is one into the tower's table of positions
            return {
                "interp_indices": _join("taps", images, device),
                "interp_weights": _join("tap_weights", images, device),
            }
        before, orders = 0, []
        for each in images:
            orders.append(before + each.plan["order"])
            before += len(each.plan["order"])
        windows = [length for each in images for length in each.plan["windows"]]
        return {
            "window_index": to_device(torch.cat(orders), device),
            "cu_window_seqlens": np.cumsum([0, *windows]),
        }

    def _from_patches(
        self, patches: Tensor, grids: Tensor, starts: Sequence[int]
    ) -> PreparedImages:
        vision = self._vision
        plan: dict[str, Any] = {"rotary": get_vision_position_ids(grids, self._merge)}
        if self._has_windows:
            plan["order"], windows = get_vision_window_index(
                grids, self._merge, vision.window_size, vision.patch_size
            )
            # a tuple: an estimate makes its tensors without numbers
            plan["windows"] = tuple(windows.diff().tolist())
        else:
            plan["taps"], plan["tap_weights"] = get_vision_interpolation_indices_and_weights(
                grids,
                int(vision.num_position_embeddings**0.5),
                mode="bilinear",
                align_corners=True,
                spatial_merge_size=self._merge,
            )
        return PreparedImages(
            starts=tuple(starts),
            shapes=tuple((rows, columns) for _, rows, columns in grids.tolist()),
            pixels=patches,
            plan=plan,
        )


def add_deep_features(hidden: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Add features [M, D] to hidden states [B, W, D] at flattened positions int64 [M].

    transformers' own method takes a mask instead, and asks the device in each layer where it is
    true.
    """
    flat = hidden.flatten(0, 1)
    return flat.index_add(0, positions, features.to(flat.dtype)).view_as(hidden)


def _join(name: str, images: Sequence[PreparedImages], device: torch.device) -> Tensor:
    return to_device(torch.cat([each.plan[name] for each in images]), device)
