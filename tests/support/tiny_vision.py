"""Tiny vision-language models with random weights, as folders in the layout of the public ones:
`config.json`, `preprocessor_config.json`, and a `chat_template.json` beside the tokenizer's files.
"""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from benchmarks import conversations
from vla_rl.models.language import TinyConfig, load_language_model
from vla_rl.models.language.tiny import write_tokenizer
from vla_rl.models.language.vision_policy import VisionLanguageModel
from vla_rl.types import Message, Trajectory

SHAPE = TinyConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, vocab_size=300)
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FAMILIES: Final = ("qwen2_5_vl", "qwen3_vl")
"""Model types of which there is a tiny one."""


def write_tiny_vision(
    folder: Path, seed: int = 0, *, family: str = "qwen2_5_vl", num_layers: int = 2, depth: int = 3
) -> Path:
    """Write the folder, and return it; `num_layers` are the trunk's, `depth` is the tower's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, SHAPE, ["left right red green blue white " * 3])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    config = CONFIGS[family](ids, num_layers, depth)
    shape: Any = transformers.AutoConfig.for_model(**config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: Any = transformers.AutoModelForImageTextToText.from_config(shape)
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def qwen2_5_config(ids: dict[str, int], num_layers: int, depth: int) -> dict[str, Any]:
    """The flat configuration that public checkpoints have, with tiny sizes."""
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.1,
        "intermediate_size": 64,
        "max_position_embeddings": 256,
        "max_window_layers": 2,
        "num_attention_heads": 2,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "sliding_window": 32768,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": SHAPE.vocab_size + len(MARKS),
        "vision_config": {
            "depth": depth,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
    }


def qwen3_config(ids: dict[str, int], num_layers: int, depth: int) -> dict[str, Any]:
    """The nested configuration of Qwen3-VL-2B, with tiny sizes: tied embeddings, DeepStack."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "tie_word_embeddings": True,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 64,
            "initializer_range": 0.1,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 2,
            "num_hidden_layers": num_layers,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "mrope_interleaved": True,
                "mrope_section": [6, 5, 5],
                "rope_type": "default",
            },
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": SHAPE.vocab_size + len(MARKS),
        },
        "vision_config": {
            "deepstack_visual_indexes": [0, depth - 1],
            "depth": depth,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "initializer_range": 0.1,
            "intermediate_size": 48,
            "model_type": "qwen3_vl",
            "num_heads": 2,
            "num_position_embeddings": 36,
            "out_hidden_size": 64,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


CONFIGS: Final[dict[str, Callable[[dict[str, int], int, int], dict[str, Any]]]] = {
    "qwen2_5_vl": qwen2_5_config,
    "qwen3_vl": qwen3_config,
}

PREPROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 64,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    },
    "qwen3_vl": {
        "size": {"longest_edge": 32 * 32 * 64, "shortest_edge": 32 * 32},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
    },
}


def tiny_vision(seed: int = 0, **given: Any) -> VisionLanguageModel:
    """The policy of such a folder, which is gone afterwards."""
    with TemporaryDirectory() as folder:
        found = load_language_model(write_tiny_vision(Path(folder), seed, **given))
    assert isinstance(found, VisionLanguageModel)
    return found


def noise(seed: int, height: int = 56, width: int = 56) -> np.ndarray:
    """An image that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def shown_episodes(policy: VisionLanguageModel) -> list[Trajectory]:
    """Three episodes: images in both of two turns that fit together, no image, and one image.

    The one without is longer than both others, so that one of two ranks gets it alone.
    """
    first, second, third = noise(1), noise(2, 56, 84), noise(3, 140, 168)
    asked, again, other = (_prompt(policy, image) for image in (first, second, third))
    reply = [20, 2]
    past = [*asked.tokens, *reply]
    longer = [*past, *again.tokens]
    starts = [*asked.starts, *(len(past) + start for start in again.starts)]
    return [
        conversations.episode(
            0,
            conversations.turn(
                policy, asked.tokens, reply, images=[first], image_starts=asked.starts
            ),
            conversations.turn(
                policy, longer, [22, 23, 2], images=[first, second], image_starts=starts
            ),
        ),
        conversations.episode(1, conversations.turn(policy, [9] * 160, [25])),
        conversations.episode(
            2,
            conversations.turn(
                policy, other.tokens, [21, 22], images=[third], image_starts=other.starts
            ),
        ),
    ]


class _Prompt(NamedTuple):
    tokens: list[int]
    starts: list[int]


def _prompt(policy: VisionLanguageModel, image: np.ndarray) -> _Prompt:
    tokens = policy.render([Message(role="user", images=(image,), content="left?")])
    return _Prompt(tokens.tolist(), policy.prepare_prompt(tokens, [image]).image_starts.tolist())
