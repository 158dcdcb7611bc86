"""GGUF files, the format of llama.cpp, as ordinary folders of weights.

    model.Q4_1.gguf ─► <cache>/model.Q4_1-<digest>/   config.json, model.safetensors (dequantised,
                                                      float32), tokenizer.json, chat template, gguf.json

transformers and the package `gguf` read the file; nothing in it is run. It is converted once: the
folder is named after the file's digest, so that another file of the same name gets a folder of its
own. What is trained and saved from there on is an ordinary checkpoint.
"""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.util.atomic_files import MANIFEST, writing_folder

SUFFIX: Final = ".gguf"
MAGIC: Final = b"GGUF"
ORIGIN_FILE: Final = "gguf.json"
SMALL_FILE_BYTES: Final = 64 << 20
"""Room kept for tokenizer and configuration."""

SMOLLM2: Final = "smollm2"
"""Name, instead of a folder, of the model that `vla-rl install smollm2` installs."""

DIGITS_FIRST: Final = frozenset(
    {"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
)
"""Tokenizers that cut off each digit before all else. llama.cpp's `tokenizer.ggml.pre` names them;
transformers reads them as GPT-2's, which takes a blank and the digit after it together."""

REQUIRED: Final = {
    "tokenizer.chat_template": "chat template",
    "tokenizer.ggml.eos_token_id": "token that ends a reply",
}
"""Entries that a file of a policy must have."""

LIKE_GPT2: Final = frozenset(
    {"default", "gpt-2", "granite-docling", "jais", "mpt", "olmo", "trillion"}
)
"""Tokenizers that cut text as GPT-2's does, which is what transformers does without a rule."""

_log = logging.getLogger(__name__)


class Origin(msgspec.Struct, frozen=True):
    """The file that a folder was made from.

    Example:
        Origin(file="SmolLM2-135M-Instruct.Q4_1.gguf", sha256="9f2c...", architecture="llama")
    """

    file: str
    sha256: str
    architecture: str


def cache_folder() -> Path:
    """Return the folder of converted models: `vla_rl/models` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "vla_rl" / "models"


def is_complete(folder: Path) -> bool:
    """Return whether a folder was converted to its end."""
    return (folder / MANIFEST).is_file()


def is_gguf(path: Path) -> bool:
    """Return whether a path names a GGUF file: by its suffix, in any case, or by how the file begins."""
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with path.open("rb") as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(file: Path) -> Path:
    """Return the folder of a GGUF file, which is converted first if it was not yet.

    Raises: CheckpointError if the file is damaged, or of a kind that transformers does not read; if
    the disk is full, or another process converts it.
    """
    digest = compute_sha256(file)
    name = file.stem if file.suffix.lower() == SUFFIX else file.name
    folder = cache_folder() / f"{name}-{digest[:16]}"
    if not is_complete(folder):
        print(f"{file} is converted to {folder}, once", flush=True)
        convert_gguf(file, folder)
    return folder


def installed_folder() -> Path:
    """Return the folder of SmolLM2. Raises: CheckpointError if it is not installed."""
    folder = cache_folder() / SMOLLM2
    if not is_complete(folder):
        raise CheckpointError(
            f"{SMOLLM2} is not installed (there is no {folder}); run `vla-rl install {SMOLLM2}`."
        )
    return folder


def compute_sha256(file: Path) -> str:
    """Return the SHA-256 of a file. Raises: CheckpointError if it cannot be read."""
    try:
        with file.open("rb") as opened:
            if opened.read(len(MAGIC)) != MAGIC:
                raise CheckpointError(
                    f"{file} is not a GGUF file (it does not begin with GGUF); download it again."
                )
            opened.seek(0)
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file as a new folder in Hugging Face's layout, whole or not at all.

    Raises: CheckpointError as `open_gguf` does.
    """
    import torch
    import transformers

    from vla_rl.models.tensor_reading import SINGLE_FILE
    from vla_rl.models.weight_files import require_loaded

    digest = compute_sha256(file)
    header = _Header(file)
    with writing_folder(folder, header.num_bytes + SMALL_FILE_BYTES) as writer:
        with _explained(file):
            source: Any = {
                "pretrained_model_name_or_path": file.absolute().parent,
                "gguf_file": file.name,
                "local_files_only": True,
            }
            loader: Any = transformers.AutoModelForCausalLM
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
            network, report = loader.from_pretrained(
                **source, dtype=torch.float32, output_loading_info=True
            )
        require_loaded(report, file)
        _split_digits(tokenizer, header.tokenizer_rule, file)
        # Otherwise whoever reads the folder would take its float32 tensors for quantised ones.
        del network.config.quantization_config
        tokenizer.init_kwargs.pop("local_files_only", None)
        temporary = writer.new_path(ORIGIN_FILE).parent
        network.config.save_pretrained(temporary)
        network.generation_config.save_pretrained(temporary)
        # Each parameter once: tied ones would be trained apart after a load.
        writer.write_tensors(SINGLE_FILE, dict(network.named_parameters()))
        tokenizer.save_pretrained(temporary)
        origin = Origin(file.name, digest, header.architecture)
        writer.write_bytes(ORIGIN_FILE, msgspec.json.encode(origin))


class _Header:
    """Describes a file before its tensors are read."""

    def __init__(self, file: Path) -> None:
        from gguf import GGUFReader

        with _explained(file):
            reader = GGUFReader(file)
            self.architecture = _read_text(reader, "general.architecture")
            self.tokenizer_rule = _read_text(reader, "tokenizer.ggml.pre")
            self.num_bytes = 4 * sum(int(tensor.n_elements) for tensor in reader.tensors)
        # transformers would end replies at a token of its own choice, the second of any Llama.
        for key, what in REQUIRED.items():
            if not _read_text(reader, key):
                raise CheckpointError(
                    f"{file} has no {what} ({key}), expected one; take a file of a model that was "
                    "trained to chat."
                )


def _read_text(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """Convert what the readers raise for a file that they cannot read to one error that names it."""
    try:
        yield
    # The readers trust the lengths in a file, so a damaged one fails wherever it is looked at.
    except Exception as error:
        raise CheckpointError(
            f"{file} cannot be read as a GGUF file: {type(error).__name__}: {str(error).rstrip('.')}. It is damaged, "
            "or of an architecture or quantisation that transformers does not read; download it "
            "again, or take the model's ordinary folder."
        ) from error


def _split_digits(tokenizer: Any, rule: str, file: Path) -> None:
    """Make the tokenizer cut text as the file's rule says, where transformers does not know it."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if rule in DIGITS_FIRST:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    elif rule and rule not in LIKE_GPT2 and rule not in GGUF_PRE_TOKENIZER_SPLITS:
        _log.warning(
            "%s cuts text by the rule %r, which is not known here, and is read as GPT-2's; compare "
            "the tokens of a few texts with the original's",
            file,
            rule,
        )
