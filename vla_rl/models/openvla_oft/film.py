"""FiLM: the instruction scales and shifts every block of both vision towers (Perez et al. 2018,
arXiv:1709.07871).

x = x + attention(x);  x = x * (1 + scale(c)) + shift(c);  x = x + mlp(x)        c: mean of the
language embeddings
"""

from torch import Tensor, nn


class FilmBlock(nn.Module):
    """Scale and shift of one block; zero at first, so that a tower starts unchanged."""

    def __init__(self, condition_width: int, tower_width: int) -> None:
        super().__init__()
        self.scale, self.shift = (
            nn.Linear(condition_width, tower_width),
            nn.Linear(condition_width, tower_width),
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to zero."""
        for layer in (self.scale, self.shift):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Modulate [B, P, W] by [B, condition_width]."""
        return x * (1.0 + self.scale(condition)[:, None]) + self.shift(condition)[:, None]  # type: ignore[no-any-return]


class Film(nn.Module):
    """The FiLM layers of both towers."""

    def __init__(
        self, condition_width: int, featurizer: nn.Module, fused_featurizer: nn.Module
    ) -> None:
        super().__init__()
        self.featurizer = _blocks(condition_width, featurizer)
        self.fused_featurizer = _blocks(condition_width, fused_featurizer)


def _blocks(condition_width: int, tower: nn.Module) -> nn.ModuleList:
    width, num_blocks = int(tower.embed_dim), len(tower.blocks)  # type: ignore[arg-type]
    return nn.ModuleList([FilmBlock(condition_width, width) for _ in range(num_blocks)])


def modulated(tower: nn.Module, blocks: nn.ModuleList, pixels: Tensor, condition: Tensor) -> Tensor:
    """Return modulated patch features [B, P, W] of a timm ViT's second-to-last block, without
    prefix tokens.
    """
    x = tower.patch_embed(pixels)  # type: ignore[operator]
    x = tower.norm_pre(tower.patch_drop(tower._pos_embed(x)))  # type: ignore[operator]
    for block, film in zip(list(tower.blocks)[:-1], list(blocks)[:-1], strict=True):  # type: ignore[arg-type]
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = film(x, condition)
        x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
    return x[:, tower.num_prefix_tokens :]  # type: ignore[no-any-return]
