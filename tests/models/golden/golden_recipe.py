"""Make the weights, frames and files of the golden checkpoint from names and seeds, by numpy alone.

The reference projects and our own code built the same checkpoint from this recipe, so the golden
arrays hold outputs only. `README.md` says how they were made. It draws from `Generator.random`
alone, which gives the same numbers under every numpy.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SEED = 20240229
WIDTH, MLP_WIDTH, NUM_LAYERS, NUM_HEADS = 32, 48, 2, 2
VOCABULARY, PADDED_VOCABULARY = 32000, 32064
IMAGE_SIZE = 224
TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
TOWER_SIZES = {"embed_dim": 24, "depth": 3, "num_heads": 2}
"""Arguments of `timm.create_model` that shrink both towers."""

ADAPTER_GAIN = np.float32(0.3)
"""Both halves of the golden adapter are the recipe's weights times this."""

NORM_KEY = "libero_goal_no_noops"
INSTRUCTIONS = (
    "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "Put both the alphabet soup and the tomato sauce in the basket",
)
"""The two prompts whose pieces the vocabulary excerpt holds: 35 and 29 ids."""

LLAMA_EXCERPT = Path(__file__).parents[1] / "data" / "llama_vocabulary_excerpt.json"


def tensor(name: str, shape: Sequence[int]) -> np.ndarray:
    """The float32 weight of that name: uniform noise whose seed is the CRC-32 of the name, scaled
    by what it is.
    """
    generator = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())]))
    noise = (2.0 * generator.random(tuple(shape)) - 1.0) * math.sqrt(3.0)  # mean 0, variance 1
    if name.endswith("scale_factor"):
        return (0.7 + 0.2 * noise).astype(np.float32)
    if name.endswith("bias"):
        return (0.1 * noise).astype(np.float32)
    if len(shape) == 1:
        return (1.0 + 0.1 * noise).astype(np.float32)
    if len(shape) == 3 or "embed_tokens" in name:  # class and register tokens, positions, words
        return (0.5 * noise).astype(np.float32)
    # attention that is not flat
    gain = 2.0 if name.rpartition(".")[0].endswith(("q_proj", "k_proj", "qkv")) else 1.0
    return (gain / math.sqrt(math.prod(shape[1:])) * noise).astype(np.float32)


def tensors(shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """All weights of one file, by name."""
    return {name: tensor(name, shape) for name, shape in shapes.items()}


def frame(seed: int, height: int = IMAGE_SIZE, width: int = IMAGE_SIZE) -> np.ndarray:
    """uint8 [height, width, 3]: blocks of 16 pixels, a ramp over them, and a quarter of noise."""
    generator = np.random.Generator(np.random.PCG64([SEED, seed]))
    blocks = (generator.random((-(-height // 16), -(-width // 16), 3)) * 128.0).astype(np.uint8)
    coarse = np.repeat(np.repeat(blocks, 16, axis=0), 16, axis=1)[:height, :width]
    ramp = (
        (np.arange(height)[:, None] + np.arange(width)[None, :])[..., None] * 64 // (height + width)
    )
    noise = (generator.random((height, width, 3)) * 64.0).astype(np.uint8)
    return (coarse + ramp + noise).astype(np.uint8)


def checks(height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3] of 0 and 255 at random, at which bicubic filters overshoot."""
    generator = np.random.Generator(np.random.PCG64([SEED, 3000]))
    return (255 * (generator.random((height, width, 3)) < 0.5)).astype(np.uint8)


def state(seed: int) -> np.ndarray:
    """float32 [8], somewhat beyond the statistics at both ends."""
    generator = np.random.Generator(np.random.PCG64([SEED, 1000 + seed]))
    return (3.0 * generator.random(8) - 1.5).astype(np.float32)


def given_tokens(seed: int, number: int) -> np.ndarray:
    """int64 [number], action token ids to be scored."""
    generator = np.random.Generator(np.random.PCG64([SEED, 2000 + seed]))
    return (VOCABULARY - 256 + (generator.random(number) * 256.0).astype(np.int64)).astype(np.int64)


def statistics() -> dict[str, Any]:
    """One data set's statistics with every field of the public files; the gripper is not scaled."""
    low = [
        -0.7454732114076613,
        -0.6616071462631226,
        -0.9375,
        -0.1071428582072258,
        -0.2067857,
        -0.1842857152223587,
        0.0,
    ]
    high = [
        0.9375,
        0.8758928775787354,
        0.9321428537368774,
        0.1039285734295845,
        0.1767857,
        0.14571428298950195,
        1.0,
    ]
    ends = {"min": [x - 0.25 for x in low], "max": [x + 0.25 for x in high]}
    action = {
        "mean": low,
        "std": high,
        **ends,
        "q01": low,
        "q99": high,
        "mask": [True] * 6 + [False],
    }
    proprio = {"mean": [0.0] * 8, "std": [1.0] * 8, "min": [-2.0] * 8, "max": [2.0] * 8}
    proprio |= {
        "q01": [-1.0, -0.8, -1.2, -1.0, -0.9, -1.1, -0.5, -0.6],
        "q99": [1.0, 0.9, 1.1, 1.3, 0.7, 1.0, 0.6, 0.5],
    }
    return {
        NORM_KEY: {
            "action": action,
            "proprio": proprio,
            "num_transitions": 100,
            "num_trajectories": 3,
        }
    }


def config() -> dict[str, Any]:
    """`config.json` as the public ones are, of a small trunk."""
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [IMAGE_SIZE, IMAGE_SIZE],
        "llm_backbone_id": "llama2-7b-pure",
        "llm_max_length": 2048,
        "model_type": "openvla",
        "n_action_bins": 256,
        "norm_stats": statistics(),
        "output_projector_states": False,
        "pad_to_multiple_of": 64,
        "pad_token_id": VOCABULARY,
        "text_config": {
            "model_type": "llama",
            "pad_token_id": VOCABULARY,
            "vocab_size": PADDED_VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": MLP_WIDTH,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": NUM_HEADS,
        },
        "timm_model_ids": list(TOWERS),
        "timm_override_act_layers": [None, None],
        "torch_dtype": "float32",
        "transformers_version": "4.40.1",
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
    }


def preprocessor() -> dict[str, Any]:
    """`preprocessor_config.json` with the values of the public ones."""
    dino = {
        "mean": [0.484375, 0.455078125, 0.40625],
        "std": [0.228515625, 0.2236328125, 0.224609375],
    }
    siglip = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    size = [IMAGE_SIZE, IMAGE_SIZE]
    resize = {"antialias": True, "interpolation": 3, "max_size": None, "size": size}
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, *size], [3, *size]],
        "interpolations": ["bicubic", "bicubic"],
        "means": [[0.485, 0.456, 0.406], [0.5, 0.5, 0.5]],
        "processor_class": "PrismaticProcessor",
        "stds": [[0.229, 0.224, 0.225], [0.5, 0.5, 0.5]],
        "tvf_crop_params": [{"output_size": size}] * 2,
        "tvf_do_letterbox": False,
        "tvf_letterbox_fill": None,
        "tvf_normalize_params": [{"inplace": False, **dino}, {"inplace": False, **siglip}],
        "tvf_resize_params": [resize, resize],
        "use_fused_vision_backbone": True,
    }


def tokenizer() -> dict[str, Any]:
    """`tokenizer.json` of Llama 2: the pieces that the two prompts need, and made-up ones at all
    other ids.
    """
    pieces = json.loads(LLAMA_EXCERPT.read_text())
    taken = set(pieces["vocab"].values())
    made_up = {f"<piece {index}>": index for index in range(VOCABULARY) if index not in taken}
    padding = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    special = ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (VOCABULARY, "<PAD>"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id_, "content": content, **padding} for id_, content in special],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": pieces["vocab"] | made_up,
            "merges": [" ".join(pair) for pair in pieces["merges"]],
        },
    }


def write_small_files(folder: Path) -> None:
    """Write everything of a public folder but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": config(),
        "preprocessor_config.json": preprocessor(),
        "tokenizer.json": tokenizer(),
        "dataset_statistics.json": statistics(),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
