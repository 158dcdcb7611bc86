"""Inputs of tests that are made by a formula: images, networks with few blocks, sizes of a tiny language model."""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.models.openvla_oft import OpenVlaOftConfig
from vla_rl.models.prismatic.config import VisionTowerConfig


def make_image(kind: str, height: int, width: int) -> np.ndarray:
    """uint8 [H, W, 3]."""
    y, x = np.mgrid[:height, :width]
    if kind == "noise":
        return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    if kind == "waves":
        return np.stack([x * 2 % 256, y * 3 % 256, (x + y) % 256], axis=-1).astype(np.uint8)
    return np.where(
        (x < width // 2)[..., None], np.array([255, 0, 10]), np.array([0, 40, 200])
    ).astype(np.uint8)


def make_image_batch(*images: np.ndarray) -> Tensor:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def shallow(config: OpenVlaOftConfig) -> OpenVlaOftConfig:
    """Return the configuration with two blocks in each stack."""
    return msgspec.structs.replace(
        config,
        llm=msgspec.structs.replace(config.llm, num_layers=2),
        featurizer=_with_two_blocks(config.featurizer),
        fused_featurizer=_with_two_blocks(config.fused_featurizer),
    )


def _with_two_blocks(tower: VisionTowerConfig) -> VisionTowerConfig:
    return msgspec.structs.replace(tower, overrides={**tower.overrides, "depth": 2})


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": None,
    "pad_token_id": 0,
}
