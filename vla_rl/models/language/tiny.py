"""A small language model made here, in the exact layout of the large ones.

It is a Llama with a million weights, whose tokenizer is trained on a few texts. transformers loads
its folder alone; nothing is downloaded.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from vla_rl.types import Config

if TYPE_CHECKING:  # takes seconds to import, as do torch and transformers below
    from vla_rl.models.language.policy import CausalLanguageModel

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tools>",
    "</tools>",
)

CHAT_TEMPLATE: Final = """
{%- set with_system = messages[0].role == 'system' -%}
{%- if tools or with_system -%}
{{- '<|im_start|>system\\n' -}}
{{- messages[0].content if with_system else '' -}}
{%- if tools -%}
{{- '\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + (tool.function | tojson) -}}{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and with_system) -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set arguments = call.function.arguments -%}
{{- '\\n' if message.content and loop.first else '' -}}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- arguments if arguments is string else (arguments | tojson) -}}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with Hermes' tool calls and no other words: each token counts for a small model."""


class TinyConfig(Config, frozen=True, kw_only=True):
    """Size of a generated language model."""

    hidden_size: int = 128
    """Width of a hidden state; the heads share it."""

    num_layers: int = 4
    """Blocks of attention and feed-forward."""

    num_heads: int = 4
    """Attention heads, each with its own keys and values."""

    intermediate_size: int = 512
    """Width of the feed-forward part."""

    vocab_size: Annotated[int, msgspec.Meta(ge=256 + len(SPECIAL_TOKENS))] = 768
    """Tokens of the vocabulary, including the 256 bytes and the special ones."""

    context_size: int = 1024
    """Largest number of tokens of a prompt and its reply together."""

    def __post_init__(self) -> None:
        self.require(
            self.hidden_size % self.num_heads == 0,
            "hidden_size",
            f"a multiple of {self.num_heads} heads",
        )


def tiny(config: TinyConfig, texts: Iterable[str], seed: int) -> "CausalLanguageModel":
    """Make a policy with random weights from `seed`, and a tokenizer trained on `texts`.

    Keeps the global random state.
    """
    from vla_rl.models.language.policy import CausalLanguageModel

    with TemporaryDirectory() as folder:
        write_tiny(Path(folder), config, texts, seed)
        return CausalLanguageModel.load(Path(folder))


def write_tiny(folder: Path, config: TinyConfig, texts: Iterable[str], seed: int) -> None:
    """Write such a model as a folder in Hugging Face's layout."""
    import torch
    import transformers

    write_tokenizer(folder, config, texts)
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        max_position_embeddings=config.context_size,
        # Tied: an output table of its own would add almost a tenth to so small a model.
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network: Any = transformers.LlamaForCausalLM(shape)  # type: ignore[no-untyped-call]
        network.save_pretrained(folder)


def write_tokenizer(folder: Path, config: TinyConfig, texts: Iterable[str]) -> dict[str, bytes]:
    """Train `tokenizer.json` (byte-level BPE, one token for each digit) and write its configuration
    and chat template.

    Between digits a token may be as long as a repeated phrase, such as the description of a tool.
    Such phrases cost a large model nothing, but would be most of a small model's input.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from vla_rl.models.small_files import companion_files

    tokenizer = Tokenizer(models.BPE())
    # One token for each digit, because sums over merged digits are harder to learn for so small a
    # model.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": config.context_size,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return companion_files(folder)
