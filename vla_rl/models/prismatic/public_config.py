"""`config.json` of the public checkpoints; `vla_rl.json` has the settings that it lacks.

The public file is kept byte for byte through a load and a save. Tower overrides, cameras, chunk
size, gripper, head and convention are stored in ours. A public folder has no `vla_rl.json` and takes
the defaults.
"""

from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.models.images import ImagePipelineName
from vla_rl.models.prismatic.action_tokens import Gripper
from vla_rl.models.prismatic.config import (
    ConstantProprio,
    LlmConfig,
    LoraConfig,
    Normalization,
    PixelScaling,
    PrismaticConfig,
    ProprioConfig,
    TrainingImages,
    VisionTowerConfig,
    Vocabulary,
)
from vla_rl.models.prismatic.conventions import Conventions
from vla_rl.util.values import excerpt

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
EXTENSION_FILE: Final = "vla_rl.json"
ARCHITECTURE: Final = "no-align+fused-gelu-mlp"


FLOW_FIELDS: Final = (b'"input_features"', b'"action_horizon"')
"""Fields of LeRobot's and openpi's configurations; their folders are recognised by tensors, if there are any."""

UNUSED_FIELDS: Final = frozenset({
    "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "max_position_embeddings",
    "pretraining_tp", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields of a trunk's configuration that change nothing of what it computes."""


class TextConfig(msgspec.Struct, kw_only=True):
    """The trunk's configuration.

    The defaults are the library's, which the public files leave out.
    """

    model_type: str = "llama"
    vocab_size: int = 32064
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-6
    pad_token_id: int = 32000
    num_key_value_heads: int | None = None
    hidden_act: str = "silu"
    rope_theta: float = 10_000.0


class Extension(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings that the public layout lacks. The defaults match the public LIBERO checkpoints.

    Example:
        A policy fine-tuned here, of two cameras and an L1 head:

        Extension(family="openvla_oft", norm_key="libero_goal", cameras=("image", "wrist_image"),
                  chunk_size=8, head="l1")
    """

    family: str | None = None
    norm_key: str | None = None
    normalization: Normalization | None = None
    cameras: tuple[str, ...] | None = None
    images: ImagePipelineName | None = None
    proprio_key: str = "state"
    proprio_constant: ConstantProprio | None = None
    chunk_size: int | None = None
    gripper: Gripper | None = None
    epsilon: float | None = None
    head: Literal["tokens", "l1", "diffusion"] | None = None
    has_film: bool = False
    has_stop_token: bool = True
    vocabulary: Vocabulary = "all"
    rope_inv_freq_dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraConfig | None = None
    training_images: TrainingImages | None = msgspec.field(default=None, name="pictures")
    featurizer_overrides: dict[str, int | float] = {}
    fused_featurizer_overrides: dict[str, int | float] = {}


class PublicConfig(msgspec.Struct, kw_only=True):
    """Fields of `config.json` that are read.

    Example:
        PublicConfig(image_sizes=(224, 224), timm_model_ids=("vit_large_patch14_reg4_dinov2.lvd142m",
                     "vit_so400m_patch14_siglip_224"), norm_stats={"libero_goal": ...}, text_config=...)
    """

    architectures: tuple[str, ...] = ("OpenVLAForActionPrediction",)
    model_type: str = "openvla"
    arch_specifier: str = ARCHITECTURE
    image_resize_strategy: str = "resize-naive"
    image_sizes: tuple[int, int]
    timm_model_ids: tuple[str, str]
    timm_override_act_layers: tuple[str | None, str | None] = (None, None)
    use_fused_vision_backbone: bool = True
    n_action_bins: int = 256
    pad_to_multiple_of: int = 64
    pad_token_id: int = 32000
    norm_stats: dict[str, Any]
    use_proprio: bool = False
    proprio_dim: int | None = None
    text_config: TextConfig


def read_public_config(folder: Path) -> PublicConfig:
    """Read and check `config.json`.

    Raises: CheckpointError if it is missing, damaged, or of another architecture.
    """
    path = folder / CONFIG_FILE
    try:
        public = msgspec.json.decode(path.read_bytes(), type=PublicConfig)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); expected a folder with {CONFIG_FILE}, "
            f"{TOKENIZER_FILE} and "
            "model.safetensors, whole or in shards."
        ) from error
    except ValueError as error:  # not text, not JSON, or JSON of another kind
        if any(name in path.read_bytes() for name in FLOW_FIELDS):
            raise CheckpointError(
                f"{path} is that of a flow policy (LeRobot's or openpi's), which needs its whole weights in "
                "model.safetensors; copy them, or merge an adapter into its base first (peft: merge_and_unload)."
            ) from error
        raise CheckpointError(f"{path} is not an OpenVLA config: {error}") from error
    _require_openvla(public, path)
    _require_plain_llama(public, msgspec.json.decode(path.read_bytes())["text_config"], path)
    return public


def _require_plain_llama(public: PublicConfig, fields: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if the trunk's configuration sets a field that is not read here, such
    as a scaling of positions, unless transformers ignores it or it has Llama's default.
    """
    text = public.text_config
    # A scaling of positions or another head size would load and compute something else, without
    # an error.
    head_dim = text.hidden_size // text.num_attention_heads
    other_fields = {
        name: fields[name] for name in fields.keys() - {*text.__struct_fields__, *UNUSED_FIELDS}
    }
    others = [
        name
        for name, value in other_fields.items()
        if value and (name, value) != ("head_dim", head_dim)
    ]
    if not others:
        return
    import transformers  # takes seconds, and public files rarely have other fields

    of_any_model = transformers.PreTrainedConfig().to_dict().keys()
    generation: Any = transformers.GenerationConfig
    of_replies = generation().to_dict().keys()
    defaults = transformers.LlamaConfig().to_dict()
    for name in sorted(others):
        if name in of_any_model or name in of_replies or defaults.get(name) == other_fields[name]:
            continue
        raise CheckpointError(
            f"{path}: text_config.{name} is {excerpt(other_fields[name])}, which is not read here; expected "
            "it to be absent or Llama's default, because the trunk would compute otherwise than "
            "it was trained."
        )


def _require_openvla(public: PublicConfig, path: Path) -> None:
    """Raise CheckpointError if a setting has another value than in every public OpenVLA."""
    text, heads = public.text_config, public.text_config.num_attention_heads
    settings: tuple[tuple[str, object, object], ...] = (
        ("model_type", public.model_type, "openvla"),
        ("arch_specifier", public.arch_specifier, ARCHITECTURE),
        ("use_fused_vision_backbone", public.use_fused_vision_backbone, True),
        ("image_resize_strategy", public.image_resize_strategy, "resize-naive"),
        ("timm_override_act_layers", public.timm_override_act_layers, (None, None)),
        # Llama 2's
        ("text_config.model_type", text.model_type, "llama"),
        ("text_config.num_key_value_heads", text.num_key_value_heads or heads, heads),
        ("text_config.hidden_act", text.hidden_act, "silu"),
        ("text_config.rope_theta", text.rope_theta, 10_000.0),
    )
    for name, found, expected in settings:
        if found != expected:
            raise CheckpointError(f"{path}: {name} is {found!r}, expected {expected!r}.")
    # The table has room for the padding token, rounded up; the action ids count from its end.
    table_size = LlmConfig(
        vocab_size=public.pad_token_id, pad_to_multiple_of=public.pad_to_multiple_of
    ).table_size
    if text.vocab_size != table_size:
        raise CheckpointError(
            f"{path}: text_config.vocab_size is {text.vocab_size}, expected {table_size}: "
            f"pad_token_id = {public.pad_token_id} and its padding, rounded up to "
            f"{public.pad_to_multiple_of}."
        )


def shared_config(
    public: PublicConfig,
    extension: Extension,
    tokenizer_file: Path,
    pixels: PixelScaling,
    rope_inv_freq_dtype: Literal["float32", "bfloat16"],
) -> dict[str, Any]:
    """Return the arguments of `PrismaticConfig` that the files of a folder alone determine."""
    text = public.text_config
    featurizer, fused_featurizer = public.timm_model_ids
    return {
        "featurizer": VisionTowerConfig(
            timm_id=featurizer, overrides=extension.featurizer_overrides
        ),
        "fused_featurizer": VisionTowerConfig(
            timm_id=fused_featurizer, overrides=extension.fused_featurizer_overrides
        ),
        "image_size": public.image_sizes[0],
        "pixels": pixels,
        "llm": LlmConfig(
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_layers=text.num_hidden_layers,
            num_heads=text.num_attention_heads,
            # the padding token is the first id after the vocabulary
            vocab_size=public.pad_token_id,
            pad_to_multiple_of=public.pad_to_multiple_of,
            rms_norm_eps=text.rms_norm_eps,
            rope_inv_freq_dtype=rope_inv_freq_dtype,
        ),
        "tokenizer_file": str(tokenizer_file),
        "num_bins": public.n_action_bins,
        "lora": extension.lora,
        "training_images": extension.training_images,
    }


def public_config(
    config: PrismaticConfig, norm_stats: dict[str, Any], proprio: ProprioConfig | None = None
) -> PublicConfig:
    """Return the public form of the settings that both families share."""
    llm = config.llm
    return PublicConfig(
        image_sizes=(config.image_size, config.image_size),
        timm_model_ids=(config.featurizer.timm_id, config.fused_featurizer.timm_id),
        n_action_bins=config.num_bins,
        pad_to_multiple_of=llm.pad_to_multiple_of,
        pad_token_id=llm.pad_token_id,
        norm_stats=norm_stats,
        use_proprio=proprio is not None,
        proprio_dim=None if proprio is None else len(proprio.low),
        text_config=TextConfig(
            vocab_size=llm.table_size,
            hidden_size=llm.hidden_size,
            intermediate_size=llm.intermediate_size,
            num_hidden_layers=llm.num_layers,
            num_attention_heads=llm.num_heads,
            rms_norm_eps=llm.rms_norm_eps,
            pad_token_id=llm.pad_token_id,
        ),
    )


def require_family(folder: Path, extension: Extension, family: str) -> None:
    """Raise CheckpointError if the checkpoint names another family; a public one names none."""
    if extension.family not in (None, family):
        raise CheckpointError(
            f"{folder} holds a policy of the family {extension.family!r}, expected {family!r}."
        )


def stored_conventions(extension: Extension) -> Conventions | None:
    """Return the conventions that a checkpoint was saved with here.

    None for a public one, which does not say.
    """
    # Folders that were saved here always name their images.
    if extension.images is None:
        return None
    return Conventions(
        images=extension.images,
        has_stop_token=extension.has_stop_token,
        rope_inv_freq_dtype=extension.rope_inv_freq_dtype,
        vocabulary=extension.vocabulary,
        epsilon=extension.epsilon or 0.0,
    )


SettingT = TypeVar("SettingT")


def resolve_setting(
    folder: Path, name: str, known: SettingT | None, asked: SettingT | None, default: SettingT
) -> SettingT:
    """Return the checkpoint's own value, else the requested one, else the default.

    Raises: CheckpointError if the requested value differs from the checkpoint's own.
    """
    if known is not None and asked is not None and asked != known:
        raise CheckpointError(
            f"{folder} has the {name} {known!r}, not {asked!r}; leave it out, because the "
            "checkpoint stores its own."
        )
    return next(value for value in (known, asked, default) if value is not None)


def read_extension(folder: Path) -> Extension:
    """Read `vla_rl.json`; return the defaults if there is none.

    Raises: CheckpointError if it cannot be read.
    """
    path = folder / EXTENSION_FILE
    if not path.is_file():
        return Extension()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Extension)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def encode_json(value: PublicConfig | Extension) -> bytes:
    """Encode a value as the text of a new file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def public_name(name: str) -> str:
    """Return a parameter's name in public files: LayerScale's factor is called `scale_factor`
    there.
    """
    return name.replace(".ls1.gamma", ".ls1.scale_factor").replace(
        ".ls2.gamma", ".ls2.scale_factor"
    )


def timm_name(name: str) -> str:
    """Return timm's own name; the inverse of `public_name`."""
    return name.replace(".ls1.scale_factor", ".ls1.gamma").replace(
        ".ls2.scale_factor", ".ls2.gamma"
    )
