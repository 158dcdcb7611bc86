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

TILE_MARKS = (
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)

TILE_TEMPLATE = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
"""That of the public SmolVLMs, which writes no content that is a text without parts."""

FAMILIES: Final = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
"""Model types of which there is a tiny one: SmolVLM's first checkpoints have Idefics3's type."""


def write_tiny_vision(
    folder: Path, seed: int = 0, *, family: str = "qwen2_5_vl", num_layers: int = 2, depth: int = 3
) -> Path:
    """Write the folder, and return it; `num_layers` are the trunk's, `depth` is the tower's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, SHAPE, ["left right red green blue white " * 3])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    is_tiled = family in ("idefics3", "smolvlm")
    marks, template = (TILE_MARKS, TILE_TEMPLATE) if is_tiled else (MARKS, TEMPLATE)
    tokenizer.add_special_tokens(list(marks))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSORS[family]))
    ids = {mark: tokenizer.token_to_id(mark) for mark in marks}
    if is_tiled:
        config_path = folder / "tokenizer_config.json"
        settings = json.loads(config_path.read_text()) | {"eos_token": "<end_of_utterance>"}
        config_path.write_text(json.dumps(settings))
        name = {"idefics3": "Idefics3Processor", "smolvlm": "SmolVLMProcessor"}[family]
        parts = {"image_seq_len": 4, "processor_class": name}
        (folder / "processor_config.json").write_text(json.dumps(parts))
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


def idefics3_config(ids: dict[str, int], num_layers: int, depth: int) -> dict[str, Any]:
    """The nested configuration of SmolVLM-256M-Instruct, with tiny sizes."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": ids["<image>"],
        "bos_token_id": 1,
        "eos_token_id": ids["<end_of_utterance>"],
        "pad_token_id": 0,
        "scale_factor": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": SHAPE.vocab_size + len(TILE_MARKS),
        "text_config": {
            "architectures": ["VLlama3ForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": ids["<end_of_utterance>"],
            "pad_token_id": 0,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 64,
            "initializer_range": 0.1,
            "intermediate_size": 64,
            "max_position_embeddings": 256,
            "num_attention_heads": 2,
            "num_hidden_layers": num_layers,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000,
            "tie_word_embeddings": False,
            "vocab_size": SHAPE.vocab_size + len(TILE_MARKS),
        },
        "vision_config": {
            "hidden_size": 32,
            "image_size": 32,
            "initializer_range": 0.1,
            "intermediate_size": 48,
            "max_image_size": {"longest_edge": 32},
            "model_type": "idefics3",
            "num_attention_heads": 2,
            "num_hidden_layers": depth,
            "patch_size": 8,
            "size": {"longest_edge": 64},
            "tie_word_embeddings": False,
            "use_base_siglip": False,
        },
    }


def smolvlm_config(ids: dict[str, int], num_layers: int, depth: int) -> dict[str, Any]:
    """That of SmolVLM2, which differs in the names of its types."""
    config = idefics3_config(ids, num_layers, depth)
    config |= {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"}
    config["vision_config"]["model_type"] = "smolvlm_vision"
    return config


CONFIGS: Final[dict[str, Callable[[dict[str, int], int, int], dict[str, Any]]]] = {
    "qwen2_5_vl": qwen2_5_config,
    "qwen3_vl": qwen3_config,
    "idefics3": idefics3_config,
    "smolvlm": smolvlm_config,
}

TILE_PREPROCESSOR: Final = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 32},
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 64},
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
    "idefics3": {
        **TILE_PREPROCESSOR,
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
    },
    "smolvlm": {
        **TILE_PREPROCESSOR,
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
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
        conversations.episode(1, conversations.turn(policy, [9] * 200, [25])),
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
