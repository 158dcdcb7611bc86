"""What a language model's folder states twice has to be the same in both places."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from tiny_vision import write_tiny_vision

from vla_rl.errors import CheckpointError
from vla_rl.models.language import TinyConfig, load_language_model
from vla_rl.models.language.tiny import write_tiny

SMALL = TinyConfig(
    hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, vocab_size=300, context_size=64
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    write_tiny(folder, SMALL, ["one two"], seed=0)
    return folder


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    return write_tiny_vision(tmp_path / "seeing")


def changed(path: Path, **fields: Any) -> None:
    held = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**held, **fields}))


def template(folder: Path) -> str:
    return (folder / "chat_template.jinja").read_text()


def named(folder: Path, text: str, name: str = "tool_use") -> None:
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / f"{name}.jinja").write_text(text)


def ids(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return found


DIFFERENT: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "template in the tokenizer's configuration": (
        lambda folder: changed(folder / "tokenizer_config.json", chat_template="{{ messages }}"),
        r"chat template 'default' .*tokenizer_config\.json says '\{\{ messages \}\}', "
        r"chat_template\.jinja with additional_chat_templates says",
    ),
    "template in the file of older processors": (
        lambda folder: changed(folder / "chat_template.json", chat_template="{{ messages }}"),
        r"chat template 'default' .*chat_template\.json says",
    ),
    "a named template in one of them": (
        lambda folder: changed(
            folder / "tokenizer_config.json",
            chat_template=[
                {"name": "default", "template": template(folder)},
                {"name": "tool_use", "template": "{{ tools }}"},
            ],
        ),
        r"names of each chat template .*\['default', 'tool_use'\].*\['default'\]",
    ),
    "a named template that differs": (
        lambda folder: (
            named(folder, "{{ tools[0] }}"),
            changed(
                folder / "tokenizer_config.json",
                chat_template=[
                    {"name": "default", "template": template(folder)},
                    {"name": "tool_use", "template": "{{ tools }}"},
                ],
            ),
        ),
        "chat template 'tool_use'",
    ),
    "the token that ends a reply": (
        lambda folder: changed(folder / "special_tokens_map.json", eos_token="<|endoftext|>"),
        r"eos_token of .*'<\|im_end\|>'.*special_tokens_map\.json says '<\|endoftext\|>'",
    ),
    "a token's id in vocab.json": (
        lambda folder: changed(folder / "vocab.json", **{**ids(folder), "a": ids(folder)["b"]}),
        r"id of the token 'a' .*tokenizer\.json says .*vocab\.json says",
    ),
    "a token's id in added_tokens.json": (
        lambda folder: changed(folder / "added_tokens.json", **{"<|im_end|>": 299}),
        r"id of the token '<\|im_end\|>' .*added_tokens\.json says 299",
    ),
    "a token's id in the tokenizer's configuration": (
        lambda folder: changed(
            folder / "tokenizer_config.json",
            added_tokens_decoder={"299": {"content": "<|im_end|>"}},
        ),
        r"id of the token '<\|im_end\|>' .*tokenizer_config\.json says 299",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_two_files_that_say_different_things_are_refused_with_both_names(
    folder: Path, difference: str
) -> None:
    change, message = DIFFERENT[difference]
    change(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_language_model(folder)
    assert len(str(caught.value)) < 800


AGREEING: Final[dict[str, Callable[[Path], Any]]] = {
    "template in both files": lambda folder: changed(
        folder / "tokenizer_config.json", chat_template=template(folder)
    ),
    "template without its last line break": lambda folder: changed(
        folder / "tokenizer_config.json",
        chat_template=template(folder).removesuffix("\n").replace("\n", "\r\n"),
    ),
    "template in three files": lambda folder: (
        changed(folder / "tokenizer_config.json", chat_template=template(folder)),
        changed(folder / "chat_template.json", chat_template=template(folder)),
    ),
    "special tokens with properties": lambda folder: changed(
        folder / "special_tokens_map.json",
        eos_token={"content": "<|im_end|>", "lstrip": False, "rstrip": False},
    ),
    "files of slow tokenizers": lambda folder: (
        changed(folder / "vocab.json", **ids(folder)),
        changed(folder / "added_tokens.json", **{"<|im_end|>": 2}),
    ),
    "ends of a reply besides the tokenizer's": lambda folder: changed(
        folder / "generation_config.json", eos_token_id=[0, 2]
    ),
}


@pytest.mark.parametrize("agreement", AGREEING)
def test_files_that_say_the_same_are_no_error(folder: Path, agreement: str) -> None:
    AGREEING[agreement](folder)
    load_language_model(folder)


def test_a_processors_template_may_differ_from_its_tokenizers_as_in_public_models(
    seeing: Path,
) -> None:
    changed(seeing / "tokenizer_config.json", chat_template="{{ messages }}")
    load_language_model(seeing)


def test_a_processors_two_templates_have_to_be_the_same(seeing: Path) -> None:
    held = json.loads((seeing / "chat_template.json").read_text())["chat_template"]
    (seeing / "chat_template.jinja").write_text(held)
    load_language_model(seeing)
    (seeing / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match="two sources of the chat template 'default'"):
        load_language_model(seeing)


def test_two_settings_of_the_same_images_have_to_be_the_same(seeing: Path) -> None:
    own = json.loads((seeing / "preprocessor_config.json").read_text())
    nested = {**own, "image_processor_type": "Qwen2VLImageProcessorFast", "new_setting": 1}
    changed(seeing / "processor_config.json", image_processor=nested)
    load_language_model(seeing)
    nested["image_mean"] = [0.5, 0.5, 0.5]
    changed(seeing / "processor_config.json", image_processor=nested)
    with pytest.raises(CheckpointError, match=r"image_mean of the images .*0\.5, 0\.5, 0\.5"):
        load_language_model(seeing)


def test_an_adapter_alone_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    with pytest.raises(CheckpointError, match=r"an adapter .* without weights.*merge_and_unload"):
        load_language_model(folder)
