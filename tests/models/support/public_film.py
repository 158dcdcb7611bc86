"""Towers with FiLM as OpenVLA-OFT's code makes and keeps them, with peft and timm alone: adapters
first, FiLM around them.

Like `public_checkpoint`, whose towers it changes, it knows none of the project's model code and
serves as the oracle.
"""

from pathlib import Path
from typing import Any

import public_checkpoint
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn


class FilmBlock(nn.Module):
    """A block of a tower, modulated by a condition that is set beforehand."""

    condition: Tensor

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block = block
        self.scale, self.shift = (
            nn.Linear(public_checkpoint.WIDTH, width),
            nn.Linear(public_checkpoint.WIDTH, width),
        )

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        block: Any = self.block
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = x * (1 + self.scale(self.condition)) + self.shift(self.condition)
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


def put_film(parts: public_checkpoint.Parts, rank: int) -> None:
    """Adapters on every linear layer of both towers, as if they had been trained, and FiLM around
    every block.
    """
    lora = {
        "r": rank,
        "lora_alpha": min(rank, 16),
        "lora_dropout": 0.0,
        "init_lora_weights": "gaussian",
    }
    for tower in (parts.dino, parts.siglip):
        # "all-linear" gathers last names and matches by them: `proj` also names the convolution
        # that cuts the patches
        linear = {
            name.rpartition(".")[2]
            for name, module in tower.named_modules()
            if isinstance(module, nn.Linear)
        }
        inject_adapter_in_model(LoraConfig(target_modules=sorted(linear), **lora), tower, "default")
        for name, parameter in tower.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
        for index, block in enumerate(tower.blocks):
            tower.blocks[index] = FilmBlock(block, public_checkpoint.OVERRIDES["embed_dim"])


def condition_on(parts: public_checkpoint.Parts, prompt: list[int]) -> None:
    """Tell all blocks the mean embedding of the words that are no actions: the prompt and the stop
    token.
    """
    condition = parts.llm.get_input_embeddings()(torch.tensor([*prompt, 2])).mean(dim=0)
    for tower in (parts.dino, parts.siglip):
        for block in tower.blocks:
            block.condition = condition


def film_part(parts: public_checkpoint.Parts) -> dict[str, Tensor]:
    """The state of the wrapped backbone."""
    return {
        f"vision_backbone.{name}.{key.replace('.gamma', '.scale_factor')}": tensor
        for name, tower in (("featurizer", parts.dino), ("fused_featurizer", parts.siglip))
        for key, tensor in tower.state_dict().items()
    }


def write_film_part(folder: Path, parts: public_checkpoint.Parts) -> Path:
    """The file that stands beside the main weights."""
    path = folder / "vision_backbone--100000_checkpoint.pt"
    torch.save(film_part(parts), path)
    return path
