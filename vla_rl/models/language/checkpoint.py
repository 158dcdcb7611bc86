"""Checkpoints of causal language models, in Hugging Face's layout for transformers.

    config.json, model.safetensors (or shards and their index), tokenizer.json,
    tokenizer_config.json, chat_template.jinja, and every other small file beside them

No code of a checkpoint is run, and nothing is unpickled.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.models.language import gguf, network_checks
from vla_rl.models.language.grid_images import GridReader
from vla_rl.models.language.images import ImageReader
from vla_rl.models.language.tile_images import TileReader
from vla_rl.models.small_files import companion_files, require_agreement
from vla_rl.models.tensor_reading import (
    HUB_ID,
    SINGLE_FILE,
    download,
    holds_weights,
    refuse_training_folder,
)
from vla_rl.models.weight_files import ADAPTER_CONFIG, check_weights, require_loaded
from vla_rl.util.arrays import require_finite
from vla_rl.util.foreign_data import find_files
from vla_rl.util.values import excerpt

IMAGE_READERS: Final[Mapping[str, type[ImageReader]]] = {
    "idefics3": TileReader,
    "qwen2_5_vl": GridReader,
    "qwen3_vl": GridReader,
    "smolvlm": TileReader,
}
"""Readers of images by the `model_type` of the networks that have them."""

TEXTS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
)
"""Patterns of the files that transformers reads, which have to be text. Others are only carried
over."""


PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json"),
}
"""Patterns of the files of which a folder needs one each."""


def has_vision(folder: Path) -> bool:
    """Return whether a folder's network has a vision tower of the kind that is read here.

    Raises: CheckpointError for a tower of another kind.
    """
    config = _read_config(folder)
    kind = config.get("model_type")
    if "vision_config" in config and kind not in IMAGE_READERS:
        raise CheckpointError(
            f"{folder} is a vision-language model of the type {kind!r}, expected one of "
            f"{', '.join(sorted(IMAGE_READERS))}; take a checkpoint of these, or one of text alone"
        )
    return kind in IMAGE_READERS


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the network's configuration; nothing if there is none, which loading it reports."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def read(
    source: str | Path, dtype: torch.dtype, *, with_images: bool
) -> tuple[Any, Any, dict[str, bytes]]:
    """Read network, tokenizer and small files; the tokenizer is in a processor if the network reads
    images.

    Raises: CheckpointError naming what is missing or does not fit.
    """
    folder = local_folder(source)
    files = companion_files(folder)
    _require_text(folder, files)
    if has_vision(folder) != with_images:
        raise CheckpointError(
            f"{source} {'has no' if with_images else 'has a'} vision tower; load it with "
            "vla_rl.models.language.load_language_model, which takes both kinds"
        )
    # Before anything is loaded: which of two templates transformers takes depends on its version.
    require_agreement(folder, with_images=with_images)
    _require_whole_weights(folder)
    _require_parts(folder)
    text_side: Any = transformers.AutoProcessor if with_images else transformers.AutoTokenizer
    if with_images and _read_config(folder)["model_type"] == "smolvlm":
        # Its own processor reads images in the same way, and needs a package more for videos.
        text_side = transformers.Idefics3Processor  # type: ignore[attr-defined]
    loader: Any = (
        transformers.AutoModelForImageTextToText
        if with_images
        else transformers.AutoModelForCausalLM
    )
    try:
        tokenizer = text_side.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        network, report = loader.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{source} is not a causal language model that transformers can load: {error}"
        ) from error
    require_loaded(report, source)
    require_finite(distinct_tensors(network), folder)
    network_checks.require_one_head(network, source)
    network_checks.require_plain_head(network, source)
    _forget_default_end(network, files)
    # looked at here too, where the folder is known
    get_stop_tokens(network, getattr(tokenizer, "tokenizer", tokenizer), str(source))
    return network, tokenizer, files


def _require_whole_weights(folder: Path) -> None:
    """Raise CheckpointError unless the folder has weights that are whole and as they were saved.

    transformers would put an adapter into the network without a word: then only the adapter is
    trained, and what is saved has names that no one loads.
    """
    if (folder / ADAPTER_CONFIG).is_file() and not holds_weights(folder):
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}) without weights, and language policies "
            "are loaded from whole weights; merge it into its base with peft "
            "(merge_and_unload, save_pretrained) and load the result."
        )
    check_weights(folder)


def _require_parts(folder: Path) -> None:
    """Raise CheckpointError unless a configuration and a tokenizer are beside the weights; transformers
    would ask for packages that make a tokenizer from another one.
    """
    for what, patterns in PARTS.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            raise CheckpointError(
                f"{folder} has no {what} ({patterns[0]}), expected one beside its weights; copy it from "
                "the checkpoint that the weights belong to."
            )


def _require_text(folder: Path, files: Mapping[str, bytes]) -> None:
    """Raise CheckpointError naming the first small file that is not text, or not JSON by its name.

    transformers does not name such a file, and silently ignores an unreadable
    generation_config.json.
    """
    for name, data in files.items():
        if not any(Path(name).match(pattern) for pattern in TEXTS):
            continue
        try:
            if name.endswith(".json"):
                # not msgspec: transformers writes NaN and Infinity as well
                json.loads(data.decode())
            else:
                data.decode()
        except (ValueError, RecursionError) as error:  # not JSON, or bytes that are not text
            kind = "JSON" if name.endswith(".json") else "text"
            raise CheckpointError(
                f"{folder / name} is not {kind} in UTF-8: {error}; download it again."
            ) from error


def _forget_default_end(network: Any, files: Mapping[str, bytes]) -> None:
    """Remove the end of text that the folder does not name: transformers fills in that of the
    architecture's class, such as token 2 of any Llama, and replies would end at a word of this model.
    """
    config, generation = (
        json.loads(files.get(name, b"{}")) for name in ("config.json", "generation_config.json")
    )
    if "eos_token_id" in config or "eos_token_id" in config.get("text_config", {}):
        return
    network.config.get_text_config().eos_token_id = None
    if network.generation_config is not None and "eos_token_id" not in generation:
        network.generation_config.eos_token_id = None


def get_stop_tokens(network: Any, tokenizer: Any, source: str = "the checkpoint") -> frozenset[int]:
    """Return the tokens that end a reply: those of the generation configuration, or else of the
    model's, and the tokenizer's end of text.

    Raises: CheckpointError if there are none, because no reply would end.
    """
    found = (
        network.generation_config.eos_token_id if network.generation_config is not None else None
    )
    # Some checkpoints name no end in generation_config.json; then that of the model's own
    # configuration holds.
    if found is None:
        found = getattr(network.config.get_text_config(), "eos_token_id", None)
    listed = found if isinstance(found, list) else [found]
    odd = [token for token in listed if token is not None and type(token) is not int]
    if odd:
        raise CheckpointError(
            f"{source}: eos_token_id is {excerpt(found)}, expected whole numbers; a reply would never end there."
        )
    tokens = frozenset(token for token in [*listed, tokenizer.eos_token_id] if token is not None)
    if not tokens:
        raise CheckpointError(
            f"{source} names no eos_token_id, so no reply would ever end; set eos_token_id in its "
            "configuration."
        )
    return tokens


def require_full_attention(network: Any) -> None:
    """Raise CheckpointError if a layer holds other state than keys and values of all positions."""
    config = network.config.get_text_config()
    # Keys and values are held for every position; a layer with a window or a recurrent state
    # would read stale ones.
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = (
        getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True)
        else None
    )
    if kinds != {"full_attention"} or window is not None:
        raise CheckpointError(
            f"{type(network).__name__} has layers of the kinds {sorted(kinds)} and a sliding "
            f"window of {window}, expected full attention in every layer; the engine's slots "
            "cannot hold other state."
        )


def distinct_tensors(network: Any) -> dict[str, Tensor]:
    """Return every parameter and buffer that is saved, under its first name; tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in network.state_dict().items():
        # Tied weights are one tensor under two names: written twice, they would be trained apart
        # after a load.
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen.add(key)
            found[name] = tensor
    return found


def load_tensors(network: Any, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a network.

    Raises: CheckpointError naming missing, unknown and misshapen tensors.
    """
    own = distinct_tensors(network)
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    misshapen = sorted(
        name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape
    )
    if missing or unknown or misshapen:
        raise CheckpointError(
            f"these tensors do not match this {type(network).__name__}: missing {missing[:5]}, "
            f"unknown {unknown[:5]}, of another shape {misshapen[:5]}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def local_folder(source: str | Path) -> Path:
    """Return the folder of a policy: itself, that of an installed model or of a GGUF file, or the
    local copy of the hub's files of this id.

    Raises: CheckpointError if there is nothing of this name, or two things are.
    """
    expected = (
        f"expected a folder, a GGUF file, {gguf.SMOLLM2}, or a hub id such as Qwen/Qwen3-0.6B."
    )
    if source == "":
        raise CheckpointError(f"the policy is an empty text, {expected}")
    folder = Path(source)
    if source == gguf.SMOLLM2:
        if folder.exists():
            raise CheckpointError(
                f"{source} is the model that `vla-rl install {source}` installs, and there is "
                f"{folder.absolute()} too; write ./{source} for the latter, or rename it."
            )
        return gguf.installed_folder()
    if folder.is_dir():
        refuse_training_folder(folder)
        files = find_files(folder, f"*{gguf.SUFFIX}")
        if files and not holds_weights(folder):
            raise CheckpointError(
                f"{folder} holds GGUF files instead of {SINGLE_FILE}; name one of them: "
                f"{', '.join(map(str, files))}"
            )
        return folder
    if gguf.is_gguf(folder):
        return gguf.open_gguf(folder)
    if isinstance(source, Path) or source.startswith(".") or HUB_ID.fullmatch(source) is None:
        raise CheckpointError(f"{source} is neither a folder nor a GGUF file, {expected}")
    return download(source, without=("*.pt",))
