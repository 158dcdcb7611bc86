"""Configuration of OpenVLA's families: towers, trunk, tokenizer, images, the meaning of actions.

`PrismaticConfig` is what they share. The configuration of a family is here too, because command
lines read it without importing torch.
"""

from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from vla_rl.models.images import ImagePipelineName
from vla_rl.models.prismatic.action_tokens import ActionBounds, unit_bounds
from vla_rl.types import Config, PositiveFloat, PositiveInt

Rgb: TypeAlias = tuple[float, float, float]
Deviations: TypeAlias = tuple[PositiveFloat, PositiveFloat, PositiveFloat]


class PixelScaling(Config, frozen=True, kw_only=True):
    """Scaling of pixels in [0, 1] for the towers, DINOv2's first: (pixel - mean) / deviation, for
    each colour.
    """

    means: tuple[Rgb, Rgb]
    stds: tuple[Deviations, Deviations]


PUBLIC_PIXELS: Final = PixelScaling(
    means=((0.484375, 0.455078125, 0.40625), (0.5, 0.5, 0.5)),
    stds=((0.228515625, 0.2236328125, 0.224609375), (0.5, 0.5, 0.5)),
)
"""Scaling of the public checkpoints. DINOv2's ImageNet constants were rounded to bfloat16 when the
weights were converted, and all fine-tunes inherited the rounded values.
"""


class VisionTowerConfig(Config, frozen=True, kw_only=True):
    """One ViT, by its timm name."""

    timm_id: str
    """Architecture in timm, such as `vit_so400m_patch14_siglip_224`."""

    overrides: dict[str, int | float] = msgspec.field(default_factory=dict)
    """Arguments that differ from the timm architecture's, such as
    `{"depth": 3, "embed_dim": 64, "num_heads": 2}`."""


class LlmConfig(Config, frozen=True, kw_only=True):
    """The Llama trunk. The defaults are those of OpenVLA's 7B checkpoints."""

    hidden_size: PositiveInt = 4096
    """Width of a token's embedding."""

    intermediate_size: PositiveInt = 11008
    """Width inside the MLPs."""

    num_layers: PositiveInt = 32
    """Transformer blocks."""

    num_heads: PositiveInt = 32
    """Attention heads; each has hidden_size / num_heads channels."""

    vocab_size: PositiveInt = 32000
    """Token ids without padding ids; the last `num_bins` of them are the action tokens."""

    pad_to_multiple_of: PositiveInt = 64
    """The embedding table has room for a padding token and is rounded up to a multiple of this."""

    rms_norm_eps: float = 1e-6
    """Not Llama-2's 1e-5: the public checkpoints use Llama's library default."""

    rope_inv_freq_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the rotary frequencies. RLinf's runs rounded them to bfloat16; set it only to
    reproduce their results."""

    def __post_init__(self) -> None:
        # Rotary positions turn pairs of channels, so a head has an even number of them.
        divides = self.hidden_size % (2 * self.num_heads) == 0
        self.require(
            divides,
            "num_heads",
            f"a divisor of hidden_size = {self.hidden_size} with an even quotient",
        )

    @property
    def pad_token_id(self) -> int:
        """The first id after the vocabulary."""
        return self.vocab_size

    @property
    def table_size(self) -> int:
        """Rows of the embedding table and of the head."""
        return -(-(self.vocab_size + 1) // self.pad_to_multiple_of) * self.pad_to_multiple_of


ConstantProprio: TypeAlias = Literal["zero", "ends"]
"""Scaling of a dimension that is constant in the training data. `zero`: it becomes 0. `ends`: -1 up
to its value and 1 above it, as in the evaluation of the public checkpoints, which adds 1e-8 to the
range and divides.
"""


class ProprioConfig(Config, frozen=True, kw_only=True):
    """Proprioception as one token.

    Example:
        ProprioConfig(low=(-0.6, -0.6, -0.1), high=(0.6, 0.6, 1.5))
    """

    key: str = "state"
    """Observation key, float32 [D]."""

    low: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    """Value that becomes -1, for each dimension; smaller ones are clipped."""

    high: tuple[float, ...]
    """Value that becomes 1, for each dimension; larger ones are clipped."""

    constant: ConstantProprio = "zero"
    """Scaling of a dimension whose `low` and `high` are equal."""

    def __post_init__(self) -> None:
        self.require(
            len(self.high) == len(self.low), "high", f"{len(self.low)} numbers, as many as low has"
        )
        rising = all(low <= high for low, high in zip(self.low, self.high, strict=True))
        self.require(rising, "high", f"not below low = {self.low} in any dimension")


LIBERO_PROPRIO: Final = ProprioConfig(
    low=(-0.6, -0.6, -0.1, -3.6, -3.6, -3.6, -0.045, -0.045),
    high=(0.6, 0.6, 1.5, 3.6, 3.6, 3.6, 0.045, 0.045),
)
"""Hand position [m], its axis-angle [rad] and both finger positions [m]; the range covers all of
LIBERO's scenes."""


LoraTargets: TypeAlias = Literal["hidden", "all-linear"] | tuple[str, ...]
"""Layers that get an adapter.

hidden       every linear layer of towers, projector and trunk, except the output head
all-linear   also the output head and the convolutions that cut patches, as OpenVLA and OpenVLA-OFT
             are fine-tuned
a tuple      the layers of these names, for an adapter that was made elsewhere
"""


class LoraConfig(Config, frozen=True, kw_only=True):
    """Low-rank adapters.

    The default rank and alpha are those of OpenVLA's and OpenVLA-OFT's fine-tuning.

    Example:
        LoraConfig(rank=32, alpha=16, targets="all-linear")  # as OpenVLA is fine-tuned
    """

    rank: PositiveInt = 32
    """Inner width of an adapter."""

    alpha: PositiveInt = 16
    """Scale of the adapter: its product is multiplied by alpha / rank."""

    targets: LoraTargets = "hidden"
    """Layers that get an adapter: `hidden`, `all-linear`, or a tuple of names."""

    def __post_init__(self) -> None:
        is_known = (
            len(self.targets) > 0
            if isinstance(self.targets, tuple)
            else self.targets in ("hidden", "all-linear")
        )
        self.require(is_known, "targets", "'hidden', 'all-linear', or a tuple of layers")


AdapterUse: TypeAlias = Literal["merge", "train"]
"""`merge`: add the adapter to the weights. `train`: keep the adapter and continue training it."""

Normalization: TypeAlias = Literal["bounds_q99", "bounds"]
"""`bounds_q99`: the 1st and 99th percentile (LIBERO, Bridge). `bounds`: minimum and maximum
(ALOHA)."""


IMAGES_FILE: Final = "vla_rl_images.json"
"""File with the `TrainingImages` of a policy whose folder is laid out by another project, as flow policies' are."""


class TrainingImages(Config, frozen=True, kw_only=True):
    """Conditions of the simulated images that a policy was trained on.

    Example:
        TrainingImages(image_size=84, quality="fast", assets="own")
    """

    image_size: int
    """Side of the camera images in pixels, before they are resized for the towers."""

    quality: Literal["exact", "fast"]
    """Rendering quality."""

    assets: str | None = None
    """`stand-ins`, or `own` for the benchmark's own meshes and textures; None: there is one kind."""


class PrismaticConfig(Config, frozen=True, kw_only=True):
    """Configuration of a policy of either family.

    The defaults are the public 7B checkpoints' shape.
    """

    featurizer: VisionTowerConfig = VisionTowerConfig(
        timm_id="vit_large_patch14_reg4_dinov2.lvd142m"
    )
    """The DINOv2 tower."""

    fused_featurizer: VisionTowerConfig = VisionTowerConfig(timm_id="vit_so400m_patch14_siglip_224")
    """The SigLIP tower."""

    image_size: Annotated[int, msgspec.Meta(ge=14)] = 224
    """Side in pixels of the towers' input; frames of another size are resized."""

    images: ImagePipelineName = "exact"
    """Image pipeline from frames to the towers' input; see `vla_rl.models.images`."""

    pixels: PixelScaling = PUBLIC_PIXELS
    """Scaling of the pixels; read from a checkpoint's `preprocessor_config.json`."""

    cameras: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("image",)
    """Observation keys of the images, in the order of the sequence."""

    llm: LlmConfig = LlmConfig()

    tokenizer_file: str
    """A `tokenizer.json` of the tokenizers library that begins each text with BOS; checkpoints
    carry their own copy."""

    num_bins: Annotated[int, msgspec.Meta(ge=3)] = 256
    """Number of action tokens: bins of each action dimension."""

    action_bounds: ActionBounds
    """Range of the bins in the environment's units; its length is the number of action
    dimensions."""

    training_images: TrainingImages | None = None
    """Images that it was trained on here, so that others are named. None: not known."""

    norm_key: str = "default"
    """Name of the action statistics in the public layout's `norm_stats`."""

    normalization: Normalization = "bounds_q99"
    """Values of those statistics that are used as bounds."""

    lora: LoraConfig | None = None
    """Adapters that are trained instead of the weights; none trains all weights."""

    def __post_init__(self) -> None:
        vocab_size = self.llm.vocab_size
        self.require(
            self.num_bins < vocab_size,
            "num_bins",
            f"below the {vocab_size} words of the vocabulary",
        )

    @property
    def action_dim(self) -> int:
        """Dimensions of the action of one control step."""
        return self.action_bounds.action_dim

    @property
    def state_size(self) -> int | None:
        """Numbers of the state that it reads; None if it reads none."""
        return None


Vocabulary: TypeAlias = Literal["all", "actions"]
"""Token ids over which OpenVLA normalises an action token's probability: all ids, or the ids of the
action bins only."""


class OpenVlaConfig(PrismaticConfig, frozen=True, kw_only=True):
    """OpenVLA (Kim et al. 2024, arXiv:2406.09246): one control step for each decision, one token
    for each dimension.
    """

    vocabulary: Vocabulary = "all"
    """Token ids over which an action token's probability is normalised, in rollout and training
    alike: `all`, as OpenVLA's authors and SimpleVLA-RL sample, or those of the `actions` alone, as
    RLinf does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            len(self.cameras) == 1, "cameras", "one camera: OpenVLA was trained on one image"
        )

    @property
    def chunk_size(self) -> int:
        """Control steps of one decision."""
        return 1


TINY_TOKENIZER: Final = Path(__file__).parents[2] / "assets" / "tiny_tokenizer" / "tokenizer.json"
"""A small byte-level tokenizer over LIBERO's instructions; `scripts/make_tokenizer.py` makes it."""

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

    chunk_size: PositiveInt = 8
    """Control steps in one action chunk."""

    head: Head = "tokens"
    """Output that is read from the trunk."""

    has_film: bool = False
    """Whether the instruction modulates the vision towers (FiLM), as in the ALOHA checkpoints."""

    has_stop_token: bool = True
    """Whether a stop token follows the placeholders; part of the convention."""

    @property
    def state_size(self) -> int | None:
        """Numbers of the state that it reads; None if it reads none."""
        return None if self.proprio is None else len(self.proprio.low)

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
