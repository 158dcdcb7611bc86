"""Small files beside the weights of a checkpoint.

All are carried from a loaded folder to a saved one, whatever their names, so that a trained policy
reads the prompts and images that it read before (`companion_files`). Only weights are left out, and
what is too large to be anything else; a line names the latter. Files in subfolders, such as
`additional_chat_templates/`, come along under their relative names, unless the subfolder holds a
model or an adapter of its own.

Some facts stand in two of them: chat templates, the token that ends a reply, ids of tokens,
settings of images. transformers takes one of the two in silence, and which one depends on its
version and on the class that reads. Here they are compared before anything is loaded
(`require_agreement`); what agrees is no error.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vla_rl.errors import CheckpointError
from vla_rl.models.tensor_reading import OTHER_WEIGHTS, SINGLE_FILE, list_some
from vla_rl.models.weight_files import ADAPTER_CONFIG
from vla_rl.util.atomic_files import MANIFEST, writing_folder
from vla_rl.util.foreign_data import find_files
from vla_rl.util.values import compare_sources, excerpt

if TYPE_CHECKING:
    from torch import Tensor

COMPANION_BYTES: Final = 64 << 20
"""Size of the largest file that is carried; the largest public tokenizer.json has 33 MB."""

SUBFOLDER_BYTES: Final = 16 << 20
"""Size of the largest subfolder that is carried."""

WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", *OTHER_WEIGHTS)

INDEX_SUFFIX: Final = ".index.json"
"""End of the name of an index of shards. A saved folder gets an index of its own."""

_MODEL_FILES: Final = ("config.json", ADAPTER_CONFIG)
"""Files that make a subfolder a model or an adapter of its own."""

_log = logging.getLogger(__name__)


def companion_files(folder: Path, without: frozenset[str] = frozenset()) -> dict[str, bytes]:
    """Read every small file of a checkpoint by relative name.

    Args:
        folder: the checkpoint.
        without: names of files that do not belong to the policy.
    """
    others = {MANIFEST, *without}
    found: dict[str, bytes] = {}
    left_behind: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inner = _list_carried(path)
            if inner is None:
                left_behind.append(f"{path.name}/")
            else:
                found |= {each.relative_to(folder).as_posix(): each.read_bytes() for each in inner}
        # By what they are not: a list of names would lose the file that a later tokenizer needs.
        elif path.is_file() and path.name not in others and not _is_weights(path):
            if path.stat().st_size <= COMPANION_BYTES:
                found[path.name] = path.read_bytes()
            else:
                left_behind.append(path.name)
    if left_behind:
        _log.warning(
            "%s of %s is too large to be saved with the policy; it stays behind",
            list_some(left_behind),
            folder,
        )
    return found


def save_folder(folder: Path, tensors: Mapping[str, "Tensor"], files: Mapping[str, bytes]) -> None:
    """Write a new folder of one file of weights and the small files, whole or not at all.

    Raises: CheckpointError.
    """
    num_bytes = sum(tensor.nbytes for tensor in tensors.values()) + sum(map(len, files.values()))
    with writing_folder(folder, num_bytes) as writer:
        writer.write_tensors(SINGLE_FILE, tensors)
        for name, data in files.items():
            writer.write_bytes(name, data)


def _list_carried(folder: Path) -> list[Path] | None:
    """Return the files of a subfolder that come along; None if they are too large together."""
    # Such as .git, or .cache of the hub's client.
    if folder.name.startswith("."):
        return []
    size, files = 0, []
    for path in (each for each in folder.rglob("*") if each.is_file()):
        if _is_weights(path) or path.name in _MODEL_FILES:
            return []
        size += path.stat().st_size
        if size > SUBFOLDER_BYTES:
            return None
        files.append(path)
    return files


def _is_weights(path: Path) -> bool:
    return path.suffix in WEIGHT_SUFFIXES or path.name.endswith(INDEX_SUFFIX)


TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_FOLDER: Final = "additional_chat_templates"
OLD_TEMPLATE_FILE: Final = "chat_template.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
PROCESSOR_CONFIG: Final = "processor_config.json"
IMAGE_CONFIG: Final = "preprocessor_config.json"
SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
DEFAULT_TEMPLATE: Final = "default"

CLASS_NAMES: Final = frozenset(
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
        (
            PROCESSOR_CONFIG if with_images else TOKENIZER_CONFIG,
            _configured_templates(folder, with_images),
        ),
        (
            OLD_TEMPLATE_FILE,
            _name_templates(_read_field(folder, OLD_TEMPLATE_FILE, "chat_template")),
        ),
        (f"{TEMPLATE_FILE} with {TEMPLATE_FOLDER}", _template_files(folder)),
    ]
    _compare_each(folder, "chat template", [each for each in templates if each[1]])
    # A different end of text means that replies end elsewhere than in training, or never.
    for token in ("bos_token", "eos_token"):
        stated = [
            (file, _token_text(_read_field(folder, file, token)))
            for file in (TOKENIZER_CONFIG, SPECIAL_TOKENS_FILE)
        ]
        _compare(f"the {token} of {folder}", [each for each in stated if each[1] is not None])
    require_same_tokens_and_images(folder)


def require_same_tokens_and_images(folder: Path) -> None:
    """Compare the ids of tokens and the settings of images, which every policy with a tokenizer or
    an image processor has.

    Raises: CheckpointError naming both files and what they say.
    """
    _compare_ids(folder)
    nested = _read_field(folder, PROCESSOR_CONFIG, "image_processor")
    if nested is not None:
        _compare_settings(folder, "images", nested, _read_json(folder / IMAGE_CONFIG))


def _configured_templates(folder: Path, with_images: bool) -> dict[str, str]:
    file = PROCESSOR_CONFIG if with_images else TOKENIZER_CONFIG
    return _name_templates(_read_field(folder, file, "chat_template"))


def _template_files(folder: Path) -> dict[str, str]:
    files = {DEFAULT_TEMPLATE: folder / TEMPLATE_FILE}
    files |= {path.stem: path for path in find_files(folder / TEMPLATE_FOLDER, "*.jinja")}
    return {
        name: _without_line_break(path.read_text("utf-8"))
        for name, path in files.items()
        if path.is_file()
    }


def _name_templates(template: Any) -> dict[str, str]:
    """Return templates by name, from one text or from the list that older versions write."""
    if isinstance(template, str):
        return {DEFAULT_TEMPLATE: _without_line_break(template)}
    if isinstance(template, list):
        template = {
            each.get("name"): each.get("template") for each in template if isinstance(each, dict)
        }
    if not isinstance(template, dict):
        return {}
    return {
        str(name): _without_line_break(text)
        for name, text in template.items()
        if isinstance(text, str)
    }


def _without_line_break(template: str) -> str:
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
    for name in sorted(nested.keys() & own.keys() - CLASS_NAMES):
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
    tokenizer = _read_json(folder / "tokenizer.json")
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
        ("vocab.json", _read_json(folder / "vocab.json")),
        ("added_tokens.json", _read_json(folder / "added_tokens.json")),
        (
            TOKENIZER_CONFIG,
            _ids_by_token(_read_field(folder, TOKENIZER_CONFIG, "added_tokens_decoder")),
        ),
    ):
        for token, number in held.items() if isinstance(held, dict) else ():
            if token in ids and ids[token] != number:
                _compare(
                    f"the id of the token {excerpt(token)} of {folder}",
                    [("tokenizer.json", ids[token]), (file, number)],
                )


def _ids_by_token(by_id: Any) -> dict[Any, int]:
    """Return the ids of tokens that a configuration lists by id."""
    items = by_id.items() if isinstance(by_id, dict) else ()
    return {_token_text(token): int(number) for number, token in items if number.isdecimal()}


def _token_text(value: Any) -> Any:
    """Return a special token's text; some files write it with its properties."""
    return value.get("content") if isinstance(value, Mapping) else value


def _read_field(folder: Path, file: str, name: str) -> Any:
    held = _read_json(folder / file)
    return held.get(name) if isinstance(held, dict) else None


def _read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if there is none."""
    if not path.is_file():
        return None
    try:
        # not msgspec: transformers writes NaN and Infinity as well
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again.") from error
