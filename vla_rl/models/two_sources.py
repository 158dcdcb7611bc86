"""Facts that the small files of a checkpoint state twice: chat templates, the token that ends a
reply, ids of tokens, settings of images.

transformers takes one of the two in silence, and which one depends on its version and on the class
that reads. Here they are compared before anything is loaded; what agrees is no error.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vla_rl.errors import CheckpointError
from vla_rl.util.values import compare_sources, excerpt

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
OLD_TEMPLATE_FILE: Final = "chat_template.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
PROCESSOR_CONFIG: Final = "processor_config.json"
IMAGE_CONFIG: Final = "preprocessor_config.json"
SPECIAL_TOKENS: Final = "special_tokens_map.json"
DEFAULT: Final = "default"

CLASSES: Final = frozenset(
    {"auto_map", "feature_extractor_type", "image_processor_type", "processor_class"}
)
"""Settings of an image processor that name a class of transformers and change no pixel."""

REMEDY: Final = "remove the one that the policy was not trained with"


def require_agreement(folder: Path, *, with_images: bool) -> None:
    """Compare all facts that the folder of a language model states twice.

    Args:
        folder: the checkpoint.
        with_images: whether a processor reads the folder, whose chat template is its own: public
            vision-language models give their tokenizer another one, which is not used.

    Raises: CheckpointError naming both files and what they say.
    """
    templates = [
        (PROCESSOR_CONFIG if with_images else TOKENIZER_CONFIG, _configured(folder, with_images)),
        (OLD_TEMPLATE_FILE, _named(_field(folder, OLD_TEMPLATE_FILE, "chat_template"))),
        (f"{TEMPLATE_FILE} with {TEMPLATE_FOLDER}", _in_files(folder)),
    ]
    _compare_each(folder, "chat template", [each for each in templates if each[1]])
    for token in ("bos_token", "eos_token"):
        said = [
            (file, _token(_field(folder, file, token)))
            for file in (TOKENIZER_CONFIG, SPECIAL_TOKENS)
        ]
        _compare(f"the {token} of {folder}", [each for each in said if each[1] is not None])
    require_same_tokens_and_images(folder)


def require_same_tokens_and_images(folder: Path) -> None:
    """Compare the ids of tokens and the settings of images, which every policy with a tokenizer or
    an image processor has.

    Raises: CheckpointError naming both files and what they say.
    """
    _compare_ids(folder)
    nested = _field(folder, PROCESSOR_CONFIG, "image_processor")
    if nested is not None:
        _compare_settings(folder, "images", nested, _json(folder / IMAGE_CONFIG))


def _configured(folder: Path, with_images: bool) -> dict[str, str]:
    file = PROCESSOR_CONFIG if with_images else TOKENIZER_CONFIG
    return _named(_field(folder, file, "chat_template"))


def _in_files(folder: Path) -> dict[str, str]:
    files = {DEFAULT: folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    return {name: _plain(path.read_text("utf-8")) for name, path in files.items() if path.is_file()}


def _named(template: Any) -> dict[str, str]:
    """Return templates by name, from one text or from the list that older versions write."""
    if isinstance(template, str):
        return {DEFAULT: _plain(template)}
    if isinstance(template, list):
        template = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
    if not isinstance(template, dict):
        return {}
    return {str(name): _plain(text) for name, text in template.items() if isinstance(text, str)}


def _plain(template: str) -> str:
    """Return a template without its last line break, which jinja does not write either."""
    return template.replace("\r\n", "\n").removesuffix("\n")


def _compare_each(folder: Path, what: str, sources: list[tuple[str, dict[str, str]]]) -> None:
    """Compare values by name: first which there are, then each."""
    if len(sources) < 2:
        return
    _compare(
        f"the names of each {what} of {folder}", [(file, sorted(held)) for file, held in sources]
    )
    for name in sources[0][1]:
        _compare(f"the {what} {name!r} of {folder}", [(file, held[name]) for file, held in sources])


def _compare_settings(folder: Path, what: str, nested: Any, own: Any) -> None:
    """Compare what both files set of a processor; null leaves a setting to the class."""
    if not isinstance(nested, dict) or not isinstance(own, dict):
        return
    for name in sorted(nested.keys() & own.keys() - CLASSES):
        one, other = nested[name], own[name]
        if isinstance(one, dict) and isinstance(other, dict):
            _compare_settings(folder, f"{name} of the {what}", one, other)
        elif one is not None and other is not None:
            _compare(
                f"{name} of the {what} of {folder}",
                [(PROCESSOR_CONFIG, one), (IMAGE_CONFIG, other)],
            )


def _compare(what: str, sources: list[tuple[str, Any]]) -> None:
    for other in sources[1:]:
        compare_sources(what, sources[0], other, remedy=REMEDY)


def _compare_ids(folder: Path) -> None:
    """Compare the ids of tokens in tokenizer.json with those in the files of slow tokenizers."""
    tokenizer = _json(folder / "tokenizer.json")
    if not isinstance(tokenizer, dict):
        return
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids[token.get("content")] = token.get("id")
    for file, held in (
        ("vocab.json", _json(folder / "vocab.json")),
        ("added_tokens.json", _json(folder / "added_tokens.json")),
        (TOKENIZER_CONFIG, _decoded(_field(folder, TOKENIZER_CONFIG, "added_tokens_decoder"))),
    ):
        for token, number in held.items() if isinstance(held, dict) else ():
            if token in ids and ids[token] != number:
                _compare(
                    f"the id of the token {excerpt(token)} of {folder}",
                    [("tokenizer.json", ids[token]), (file, number)],
                )


def _decoded(by_id: Any) -> dict[Any, int]:
    """Return the ids of tokens that a configuration lists by id."""
    items = by_id.items() if isinstance(by_id, dict) else ()
    return {_token(token): int(number) for number, token in items if number.isdecimal()}


def _token(value: Any) -> Any:
    """Return a special token's text; some files write it with its properties."""
    return value.get("content") if isinstance(value, Mapping) else value


def _field(folder: Path, file: str, name: str) -> Any:
    held = _json(folder / file)
    return held.get(name) if isinstance(held, dict) else None


def _json(path: Path) -> Any:
    """Return the content of a JSON file; None if there is none."""
    if not path.is_file():
        return None
    try:
        # not msgspec: transformers writes NaN and Infinity as well
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again.") from error
