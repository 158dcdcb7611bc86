"""Base of every Prismatic network: fused vision towers, their projector, a Llama.

    images uint8 [B, N, 3, S, S] ─► DINOv2 normalisation  ─► featurizer       ─┐
                                 └► SigLIP normalisation  ─► fused_featurizer ─┴► channels ─► projector [B, N * P, D]

DINOv2's and SigLIP's features are joined for each patch. Parameter names are those of the public
checkpoints (`featurizer`, `fused_featurizer`; `fc1`, `fc2`, `fc3`), except for timm's own names
inside the towers. Every OpenVLA family uses this module.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import timm
import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError
from vla_rl.models.prismatic.adapters import get_adapter
from vla_rl.models.prismatic.config import PixelScaling, PrismaticConfig
from vla_rl.models.prismatic.trunk import build_trunk

VIT_MODULE: Final = "timm.models.vision_transformer"


def build_tower(timm_id: str, image_size: int, overrides: Mapping[str, Any]) -> nn.Module:
    """Build a timm ViT without a head, at `image_size`; `overrides` change its size, such as
    `{"depth": 3, "embed_dim": 64}`.

    Raises: ConfigError if timm cannot build it.
    """
    options = dict(overrides)
    if torch.get_default_device().type == "meta" and _is_plain_vit(timm_id):
        # random weights of a shape without memory take most of the time that it takes to build it
        options.setdefault("weight_init", "skip")
    try:
        tower: nn.Module = timm.create_model(
            timm_id, pretrained=False, num_classes=0, img_size=image_size, **options
        )
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"timm cannot build the vision tower {timm_id!r} at {image_size} pixels with "
            f"{dict(overrides)}: {error}; expected one of its ViTs, such as those of the public "
            "checkpoints."
        ) from error
    return tower


def _is_plain_vit(timm_id: str) -> bool:
    name, *_ = timm_id.split(".")
    return bool(timm.is_model(name) and timm.model_entrypoint(name).__module__ == VIT_MODULE)


RunTower: TypeAlias = Callable[[nn.Module, Tensor, str], Tensor]
"""(tower, its normalised pixels [B, 3, S, S], its name) -> patch features [B, P, W]."""


def _second_to_last_block(tower: nn.Module, pixels: Tensor, name: str) -> Tensor:
    layers = tower.forward_intermediates(  # type: ignore[operator]
        pixels,
        indices=[len(tower.blocks) - 2],  # type: ignore[arg-type]
        norm=False,
        stop_early=True,
        output_fmt="NLC",
        intermediates_only=True,
    )
    features: Tensor = layers[0]
    return features


class FusedVisionBackbone(nn.Module):
    """Two ViTs on the same image; their patch features are concatenated along the channels.

    A feature is the output of the second-to-last block, without the final norm; prefix tokens
    (class, registers) are dropped. The last block, the norm and SigLIP's pooling never run; they
    exist because checkpoints hold them.
    """

    def __init__(
        self, featurizer: nn.Module, fused_featurizer: nn.Module, *, pixels: PixelScaling
    ) -> None:
        super().__init__()
        self.featurizer, self.fused_featurizer = featurizer, fused_featurizer
        self._pixels = pixels
        self.materialise_buffers(torch.get_default_device())

    def materialise_buffers(self, device: torch.device) -> None:
        """Move the normalisation constants to `device`: a network built on the meta device has
        none.
        """
        (dino_mean, siglip_mean), (dino_std, siglip_std) = self._pixels.means, self._pixels.stds
        rows = (dino_mean, dino_std, siglip_mean, siglip_std)
        # In float32 whatever the weights are cast to: pixels are normalised first and cast then.
        constants = torch.tensor(rows, dtype=torch.float32, device=device)
        self.register_buffer("_constants", constants.view(4, 1, 3, 1, 1), persistent=False)

    @property
    def width(self) -> int:
        """Channels of a fused patch."""
        return int(self.featurizer.embed_dim) + int(self.fused_featurizer.embed_dim)  # type: ignore[arg-type]

    def forward(self, images: Tensor, run_tower: RunTower = _second_to_last_block) -> Tensor:
        """Compute patch features [B, N * patches, width] of images uint8 [B, N, 3, S, S].

        `run_tower` runs a tower on pixels.
        """
        batch, num_images = images.shape[:2]
        # Images travel as bytes and become floats here, so that queues and copies are four times
        # smaller.
        pixels = images.flatten(0, 1).float() / 255.0
        dino_mean, dino_std, siglip_mean, siglip_std = self._constants.float().unbind(0)  # type: ignore[operator]
        dtype = next(self.featurizer.parameters()).dtype
        towers = (
            ("featurizer", (pixels - dino_mean) / dino_std),
            ("fused_featurizer", (pixels - siglip_mean) / siglip_std),
        )
        patches = torch.cat(
            [run_tower(getattr(self, name), scaled.to(dtype), name) for name, scaled in towers],
            dim=-1,
        )
        return patches.view(batch, num_images * patches.shape[1], patches.shape[2])


class Projector(nn.Module):
    """The 3-layer MLP from fused patches to the LLM's width, exact GELU between the layers."""

    def __init__(self, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_width, 4 * vision_width)
        self.fc2 = nn.Linear(4 * vision_width, llm_width)
        self.fc3 = nn.Linear(llm_width, llm_width)

    def forward(self, patches: Tensor) -> Tensor:
        """Map [B, P, vision_width] to [B, P, llm_width]."""
        hidden = nn.functional.gelu(self.fc1(patches))
        return self.fc3(nn.functional.gelu(self.fc2(hidden)))  # type: ignore[no-any-return]


class ProprioProjector(nn.Module):
    """The 2-layer MLP that turns normalised proprioception into one token, exact GELU between the
    layers.
    """

    def __init__(self, num_inputs: int, llm_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, llm_width)
        self.fc2 = nn.Linear(llm_width, llm_width)

    def forward(self, proprio: Tensor) -> Tensor:
        """Map [B, num_inputs] to [B, llm_width]."""
        return self.fc2(nn.functional.gelu(self.fc1(proprio)))  # type: ignore[no-any-return]


class PrismaticNetwork(nn.Module):
    """The parts under the public checkpoints' names; each family defines how they are combined.

    Args:
        config: configuration of towers and trunk.
        is_causal: whether the trunk's attention is causal.
    """

    def __init__(self, config: PrismaticConfig, *, is_causal: bool) -> None:
        super().__init__()
        self.vision_backbone = FusedVisionBackbone(
            *(
                build_tower(tower.timm_id, config.image_size, tower.overrides)
                for tower in (config.featurizer, config.fused_featurizer)
            ),
            pixels=config.pixels,
        )
        self.projector = Projector(self.vision_backbone.width, config.llm.hidden_size)
        self.language_model = build_trunk(config.llm, is_causal=is_causal)

    def head_logits(self, hidden: Tensor, ids: slice) -> Tensor:
        """Return the logits of the token ids in `ids` for the trunk's output [..., D]; other rows
        of the head are not computed.
        """
        head = self.language_model.lm_head
        # OpenVLA-OFT needs 256 of 32,064 rows: logits of all would be 125 times as large.
        logits: Tensor = hidden @ head.weight[ids].T
        adapter = get_adapter(head)
        if adapter is not None:
            logits = logits + adapter.scale * (hidden @ adapter.down.T @ adapter.up[ids].T)
        return logits

    def block_stacks(self) -> tuple[Iterable[nn.Module], ...]:
        """Return the blocks of both towers and of the trunk, each stack from its first to
        its last.
        """
        towers = (self.vision_backbone.featurizer, self.vision_backbone.fused_featurizer)
        return (*(tower.blocks for tower in towers), self.language_model.model.layers)
