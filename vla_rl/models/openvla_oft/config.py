"""The configuration of an OpenVLA-OFT policy: everything that its network, processor and action tokens depend on."""

from pathlib import Path
from typing import Final

import msgspec

from vla_rl.models.openvla_oft.action_tokens import ActionBounds, unit_bounds
from vla_rl.types import Config

TINY_TOKENIZER: Final = Path(__file__).parents[2] / "assets" / "tiny_tokenizer" / "tokenizer.json"
"""A small byte-level tokenizer over LIBERO's instructions; `make_tokenizer.py` makes it."""


class VisionTowerConfig(Config, frozen=True, kw_only=True):
    """One ViT, by its timm name."""

    timm_id: str
    """Architecture in timm, such as `vit_so400m_patch14_siglip_224`."""

    overrides: dict[str, int | float] = msgspec.field(default_factory=dict)
    """Arguments of the timm architecture that differ, such as `{"depth": 3, "embed_dim": 64, "num_heads": 2}`."""


class LlmConfig(Config, frozen=True, kw_only=True):
    """The Llama trunk. The defaults are those of OpenVLA's 7B checkpoints."""

    hidden_size: int = 4096
    """Width of a token."""

    intermediate_size: int = 11008
    """Width inside the MLPs."""

    num_layers: int = 32
    """Transformer blocks."""

    num_heads: int = 32
    """Attention heads; each has hidden_size / num_heads channels."""

    vocab_size: int = 32000
    """Token ids without padding ids; the last `num_bins` of them are the action tokens."""

    pad_to_multiple_of: int = 64
    """The embedding table has room for a padding token and is rounded up to a multiple of this."""

    rms_norm_eps: float = 1e-6
    """Not Llama-2's 1e-5: the public checkpoints run with Llama's library default."""

    def __post_init__(self) -> None:
        for field in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "vocab_size",
            "pad_to_multiple_of",
        ):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        divides = self.hidden_size % (2 * self.num_heads) == 0
        self.require(divides, "num_heads", f"a divisor of hidden_size = {self.hidden_size} with an even quotient")

    @property
    def pad_token_id(self) -> int:
        """The first id after the vocabulary."""
        return self.vocab_size

    @property
    def table_size(self) -> int:
        """Rows of the embedding table and of the head."""
        return -(-(self.vocab_size + 1) // self.pad_to_multiple_of) * self.pad_to_multiple_of


class ProprioConfig(Config, frozen=True, kw_only=True):
    """Proprioception as one token."""

    key: str = "state"
    """Observation key, float32 [D]."""

    low: tuple[float, ...]
    """Value that becomes -1, dimension by dimension; smaller ones are clipped."""

    high: tuple[float, ...]
    """Value that becomes 1; larger ones are clipped."""

    def __post_init__(self) -> None:
        self.require(len(self.low) > 0, "low", "one number for each dimension")
        self.require(len(self.high) == len(self.low), "high", f"{len(self.low)} numbers, as many as low has")
        rising = all(low < high for low, high in zip(self.low, self.high, strict=True))
        self.require(rising, "high", f"above low = {self.low} in every dimension")


LIBERO_PROPRIO: Final = ProprioConfig(
    low=(-0.6, -0.6, -0.1, -3.6, -3.6, -3.6, -0.045, -0.045), high=(0.6, 0.6, 1.5, 3.6, 3.6, 3.6, 0.045, 0.045)
)
"""Hand position [m], its axis-angle [rad] and both finger positions [m], over all of LIBERO's scenes."""


class OpenVlaOftConfig(Config, frozen=True, kw_only=True):
    """OpenVLA-OFT with discrete action tokens, decoded in parallel. The defaults are the public 7B checkpoints' shape."""

    featurizer: VisionTowerConfig = VisionTowerConfig(timm_id="vit_large_patch14_reg4_dinov2")
    """The DINOv2 tower."""

    fused_featurizer: VisionTowerConfig = VisionTowerConfig(timm_id="vit_so400m_patch14_siglip_224")
    """The SigLIP tower."""

    image_size: int = 224
    """Side in pixels that both towers see; frames of another size are resized (bicubic, antialiased)."""

    cameras: tuple[str, ...] = ("image",)
    """Observation keys of the images, in the order of the sequence."""

    proprio: ProprioConfig | None = None
    """Proprioception as a token after the patches; none where the checkpoint has no proprio projector."""

    llm: LlmConfig = LlmConfig()

    tokenizer_file: str
    """A `tokenizer.json` of the tokenizers library, beginning with BOS; checkpoints carry their own copy."""

    chunk_size: int = 8
    """Control steps in one action chunk."""

    num_bins: int = 256
    """Action tokens: bins of every action dimension."""

    action_bounds: ActionBounds
    """What the bins mean in the environment's units; also says how many action dimensions there are."""

    norm_key: str = "default"
    """Name of the action statistics in the public layout's `norm_stats`."""

    def __post_init__(self) -> None:
        self.require(self.image_size >= 14, "image_size", "at least one patch of 14 pixels")
        self.require(len(self.cameras) >= 1, "cameras", "at least one observation key")
        self.require(self.chunk_size >= 1, "chunk_size", "at least 1 control step")
        self.require(3 <= self.num_bins < self.llm.vocab_size, "num_bins", "at least 3 and below the vocabulary's size")

    @property
    def action_dim(self) -> int:
        """Numbers in one control step."""
        return self.action_bounds.action_dim

    @property
    def num_action_tokens(self) -> int:
        """Tokens of one action chunk."""
        return self.chunk_size * self.action_dim


def tiny(
    *,
    image_size: int = 56,
    cameras: tuple[str, ...] = ("image", "wrist_image"),
    proprio: ProprioConfig | None = LIBERO_PROPRIO,
    chunk_size: int = 8,
    action_dim: int = 7,
) -> OpenVlaOftConfig:
    """The same architecture with about 1.4 million parameters, for two CPU cores: trained from scratch, unit bounds."""
    width = {"embed_dim": 64, "depth": 3, "num_heads": 2}
    return OpenVlaOftConfig(
        # LayerScale of 1e-5 is for fine-tuning deep towers; a shallow one that starts from scratch would stay blind
        featurizer=VisionTowerConfig(timm_id="vit_large_patch14_reg4_dinov2", overrides={**width, "init_values": 1.0}),
        fused_featurizer=VisionTowerConfig(timm_id="vit_so400m_patch14_siglip_224", overrides=dict(width)),
        image_size=image_size,
        cameras=cameras,
        proprio=proprio,
        llm=LlmConfig(hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, vocab_size=1024),
        tokenizer_file=str(TINY_TOKENIZER),
        chunk_size=chunk_size,
        action_bounds=unit_bounds(action_dim),
    )
