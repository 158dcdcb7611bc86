"""The 7B network on the meta device: each published name with its shape, and the published sizes of
its parts.
"""

from typing import Any

import torch
from libero_bounds import LIBERO_BOUNDS

from vla_rl.models.openvla_oft import OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.prismatic.config import LIBERO_PROPRIO, TINY_TOKENIZER
from vla_rl.models.prismatic.public_config import public_name


def full_size(**fields: Any) -> OpenVlaOftNetwork:
    bounds = LIBERO_BOUNDS["libero_10"]
    with torch.device("meta"):
        return OpenVlaOftNetwork(
            OpenVlaOftConfig(tokenizer_file=str(TINY_TOKENIZER), action_bounds=bounds, **fields)
        )


def linear(name: str, size_out: int, size_in: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size_out, size_in), f"{name}.bias": (size_out,)}


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def tower(
    prefix: str, width: int, inner: int, depth: int, layer_scale: bool
) -> dict[str, tuple[int, ...]]:
    """A ViT of 16 x 16 patches of 14 pixels."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.pos_embed": (1, 256, width),
        f"{prefix}.patch_embed.proj.weight": (width, 3, 14, 14),
        f"{prefix}.patch_embed.proj.bias": (width,),
        **norm(f"{prefix}.norm", width),
    }
    for index in range(depth):
        block = f"{prefix}.blocks.{index}"
        shapes |= {**norm(f"{block}.norm1", width), **norm(f"{block}.norm2", width)}
        shapes |= {
            **linear(f"{block}.attn.qkv", 3 * width, width),
            **linear(f"{block}.attn.proj", width, width),
        }
        shapes |= {
            **linear(f"{block}.mlp.fc1", inner, width),
            **linear(f"{block}.mlp.fc2", width, inner),
        }
        if layer_scale:
            shapes |= {f"{block}.ls1.scale_factor": (width,), f"{block}.ls2.scale_factor": (width,)}
    return shapes


def published() -> dict[str, tuple[int, ...]]:
    dino, siglip = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    shapes: dict[str, tuple[int, ...]] = {
        **tower(dino, 1024, 4096, 24, layer_scale=True),
        f"{dino}.cls_token": (1, 1, 1024),
        f"{dino}.reg_token": (1, 4, 1024),
        **tower(siglip, 1152, 4304, 27, layer_scale=False),
        f"{siglip}.attn_pool.latent": (1, 1, 1152),
        **linear(f"{siglip}.attn_pool.q", 1152, 1152),
        **linear(f"{siglip}.attn_pool.kv", 2304, 1152),
        **linear(f"{siglip}.attn_pool.proj", 1152, 1152),
        **norm(f"{siglip}.attn_pool.norm", 1152),
        **linear(f"{siglip}.attn_pool.mlp.fc1", 4304, 1152),
        **linear(f"{siglip}.attn_pool.mlp.fc2", 1152, 4304),
        **linear("projector.fc1", 8704, 2176),
        **linear("projector.fc2", 4096, 8704),
        **linear("projector.fc3", 4096, 4096),
        "language_model.model.embed_tokens.weight": (32064, 4096),
        "language_model.model.norm.weight": (4096,),
        "language_model.lm_head.weight": (32064, 4096),
    }
    for index in range(32):
        layer = f"language_model.model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (4096, 4096) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (11008, 4096) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (4096, 11008)}
        shapes |= {
            f"{layer}.{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")
        }
    return shapes


def test_each_of_982_names_has_its_published_shape() -> None:
    found = {
        public_name(name): tuple(tensor.shape) for name, tensor in full_size().state_dict().items()
    }
    assert len(found) == 982
    assert found == published()


def test_the_parts_of_continuous_policies_have_their_published_sizes() -> None:
    network = full_size(head="l1", proprio=LIBERO_PROPRIO)
    for part, size in ((network.action_head, 151_117_831), (network.proprio_projector, 16_818_176)):
        assert part is not None
        assert sum(parameter.numel() for parameter in part.parameters()) == size
