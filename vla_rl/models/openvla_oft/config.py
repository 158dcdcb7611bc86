"""The configuration of an OpenVLA-OFT policy: all settings of its network, processor and action
tokens.
"""

from pathlib import Path
from typing import Final, Literal, TypeAlias

from vla_rl.models.prismatic.action_tokens import unit_bounds
from vla_rl.models.prismatic.config import (
    LIBERO_PROPRIO,
    LlmConfig,
    PrismaticConfig,
    ProprioConfig,
    VisionTowerConfig,
)

TINY_TOKENIZER: Final = Path(__file__).parents[2] / "assets" / "tiny_tokenizer" / "tokenizer.json"
"""A small byte-level tokenizer over LIBERO's instructions; `make_tokenizer.py` makes it."""

Head: TypeAlias = Literal["tokens", "l1", "diffusion"]
"""`tokens`: 256 bins for each number, required for reinforcement learning. `l1` and `diffusion`:
numbers; `diffusion` is for imitation only.
"""

NewPart: TypeAlias = Literal["action_head", "proprio_projector", "noisy_action_projector", "film"]
"""A part that may be new. `noisy_action_projector` belongs to a diffusion head; new FiLM layers
change nothing at first."""


class OpenVlaOftConfig(PrismaticConfig, frozen=True, kw_only=True):
    """OpenVLA-OFT (Kim et al. 2025, arXiv:2502.19645): a whole chunk in one pass.

    Defaults: the public discrete ones.
    """

    proprio: ProprioConfig | None = None
    """Proprioception as a token after the patches; none if the checkpoint has no proprio
    projector."""

    chunk_size: int = 8
    """Control steps in one action chunk."""

    head: Head = "tokens"
    """Output that is read from the trunk."""

    has_film: bool = False
    """Whether the instruction modulates the vision towers (FiLM), as in the ALOHA checkpoints."""

    has_stop_token: bool = True
    """Whether a stop token follows the placeholders; part of the dialect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.chunk_size >= 1, "chunk_size", "at least 1 control step")

    @property
    def num_action_tokens(self) -> int:
        """Tokens, or numbers, of one action chunk."""
        return self.chunk_size * self.action_dim


def tiny(
    *,
    image_size: int = 56,
    cameras: tuple[str, ...] = ("image", "wrist_image"),
    proprio: ProprioConfig | None = LIBERO_PROPRIO,
    chunk_size: int = 8,
    action_dim: int = 7,
    head: Head = "tokens",
    has_film: bool = False,
) -> OpenVlaOftConfig:
    """Return a small configuration, about 1.4 million parameters, for training from scratch on two
    CPU cores.
    """
    width = {"embed_dim": 64, "depth": 3, "num_heads": 2}
    return OpenVlaOftConfig(
        # LayerScale of 1e-5 is for fine-tuning deep towers; a shallow one that starts from scratch
        # would stay blind
        featurizer=VisionTowerConfig(
            timm_id="vit_large_patch14_reg4_dinov2", overrides={**width, "init_values": 1.0}
        ),
        fused_featurizer=VisionTowerConfig(
            timm_id="vit_so400m_patch14_siglip_224", overrides=dict(width)
        ),
        image_size=image_size,
        images="bicubic",
        cameras=cameras,
        proprio=proprio,
        llm=LlmConfig(
            hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4, vocab_size=1024
        ),
        tokenizer_file=str(TINY_TOKENIZER),
        chunk_size=chunk_size,
        action_bounds=unit_bounds(action_dim),
        head=head,
        has_film=has_film,
    )
