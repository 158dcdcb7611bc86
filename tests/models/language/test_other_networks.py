"""Networks that compute more than a trunk, slots of keys and values, and an output layer are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from made_inputs import SIZES
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError
from vla_rl.models.language import CausalLanguageModel, TinyConfig
from vla_rl.models.language.tiny import write_tiny, write_tokenizer
from vla_rl.types import Message

SMALL = TinyConfig(
    hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, vocab_size=300, context_size=64
)


def write(folder: Path, config: Any) -> Path:
    """Write a network with random weights, which are large enough to tell bounded logits from others."""
    torch.manual_seed(0)
    network: Any = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    network.save_pretrained(folder)
    write_tokenizer(folder, SMALL, ["one two"])
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.GraniteConfig(**SIZES, logits_scaling=8.0), "scales or bounds the logits"),
        (transformers.CohereConfig(**SIZES, logit_scale=0.0625), "scales or bounds the logits"),
        (transformers.NanoChatConfig(**SIZES), "scales or bounds the logits"),
        (
            transformers.MiniCPM3Config(**SIZES),  # type: ignore[attr-defined]
            "cannot read two tokens here|cannot read a conversation here",
        ),
    ],
    ids=["granite", "cohere", "nanochat", "minicpm3"],
)
def test_a_network_that_is_computed_otherwise_is_refused(
    config: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        CausalLanguageModel.load(write(tmp_path / "policy", config))


def test_a_scale_of_one_is_no_scale(tmp_path: Path) -> None:
    config = transformers.GraniteConfig(**SIZES, logits_scaling=1.0, residual_multiplier=0.5)
    policy = CausalLanguageModel.load(write(tmp_path / "policy", config))
    network: Any = policy.network
    found = policy.extend(policy.key_values(1), [0], [0], [[5, 6, 7]])
    expected = network(torch.tensor([[5, 6, 7]])).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_conversations_end_where_rotary_positions_would_be_stretched(tmp_path: Path) -> None:
    # beyond it, the frequencies depend on the longest row of the batch
    stretched = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {**stretched, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    config = transformers.Phi3Config(
        **SIZES,
        sliding_window=None,
        original_max_position_embeddings=16,
        rope_parameters=rope,
    )
    assert CausalLanguageModel.load(write(tmp_path / "policy", config)).context_size == 16


def own_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = 2.0 * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def text_as_end(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": "2"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (own_head, "has tie_word_embeddings, but the weights hold another output layer"),
        (text_as_end, "eos_token_id is '2', expected whole numbers"),
    ],
)
def test_a_folder_that_readers_would_take_differently_is_refused(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = tmp_path
    write_tiny(folder, SMALL, ["one two"], seed=0)
    CausalLanguageModel.load(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        CausalLanguageModel.load(folder)


def chat(folder: Path, template: str) -> CausalLanguageModel:
    write_tiny(folder, SMALL, ["one two"], seed=0)
    (folder / "chat_template.jinja").write_text(template)
    return CausalLanguageModel.load(folder)


def test_a_template_that_leaves_out_what_a_user_says_is_refused(tmp_path: Path) -> None:
    # one for contents in parts reads the letters of a text, which have no type
    parts = "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}: {parts}{{% endfor %}}"
    with pytest.raises(CheckpointError, match="leaves out what a user says"):
        chat(tmp_path, template)


def test_a_system_message_that_the_template_leaves_out_begins_the_next_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }};{% endfor %}"
    )
    policy = chat(tmp_path, template)
    system, user = (
        Message(role="system", content="one"),
        Message(role="user", content="two"),
    )
    assert policy.render_text([system, user]) == "user: one\n\ntwo;"
    assert policy.render_text([user]) == "user: two;"
    (line,) = [each.getMessage() for each in caplog.records if "system" in each.getMessage()]
    assert "leaves out system messages" in line
