"""A checkpoint folder in the public layout: found, read, and later saved with all of its files.

It is one folder, or two if its weights are a base and a peft adapter: then parts and small files
beside the adapter take precedence over the base's. Python files beside the weights are copied as
bytes and never imported. Nothing is written into the folder; a trained policy is saved to a new
one.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vla_rl.errors import CheckpointError
from vla_rl.models.companion_files import companion_files
from vla_rl.models.prismatic.config import PixelScaling
from vla_rl.models.prismatic.hub import HUB_ID, downloaded
from vla_rl.models.prismatic.peft_adapter import (
    LORA_FOLDER,
    PeftAdapter,
    find_adapter,
)
from vla_rl.models.prismatic.preprocessor import read_pixel_scaling
from vla_rl.models.prismatic.public_config import (
    CONFIG_FILE,
    EXTENSION_FILE,
    TOKENIZER_FILE,
    Extension,
    PublicConfig,
    read_extension,
    read_public_config,
)
from vla_rl.models.prismatic.statistics import StatisticsSets, read_statistics
from vla_rl.models.two_sources import require_same_tokens_and_images
from vla_rl.models.weight_files import (
    ADAPTER_CONFIG,
    INDEX_FILE,
    MAIN_WEIGHTS,
    holds_weights,
    refuse_adapter_beside,
)

_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/\w+/?")
"""Path under which the hub's client stores a repository. OpenVLA-OFT's training notes such a path
as an adapter's base."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublicFolder:
    """A checkpoint on disk, read except for its weights."""

    path: Path
    """Folder of the main weights."""

    public: PublicConfig
    extension: Extension
    statistics: StatisticsSets
    """Action statistics by key."""

    pixels: PixelScaling
    """Pixel scaling of the checkpoint's own processor."""

    files: Mapping[str, bytes]
    """Every small file beside the weights, unchanged; includes `config.json` and the tokenizer."""

    index: bytes | None
    """The index of shards as bytes; None if the weights are one file."""

    adapter: PeftAdapter | None = None
    """An adapter that belongs on the main weights."""

    beside_adapter: Path | None = None
    """Folder of the parts and small files that were trained together with the adapter."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of parts and small files; an earlier one takes precedence."""
        return (self.path,) if self.beside_adapter is None else (self.beside_adapter, self.path)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer's file."""
        return _folder_of_file(TOKENIZER_FILE, self.folders) / TOKENIZER_FILE

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Every file, including the adapter's."""
        places = dict.fromkeys((*self.folders, *([self.adapter.path] if self.adapter else [])))
        return tuple(file for place in places for file in sorted(place.iterdir()) if file.is_file())


def open_folder(
    checkpoint: Path | str | PublicFolder, adapter: Path | str | None = None
) -> PublicFolder:
    """Read a checkpoint except for its weights; one that is already read is returned unchanged.

    Args:
        checkpoint: a folder, or a Hugging Face hub id. One that has an adapter but no weights is
            read with the base that the adapter names.
        adapter: folder or hub id of an adapter that was trained on `checkpoint`, with the parts
            beside it.

    Raises: CheckpointError if it is neither a folder nor a hub id, or is not a checkpoint of
    OpenVLA's architecture.
    """
    if isinstance(checkpoint, PublicFolder):
        if adapter is not None and checkpoint.adapter is None:
            raise CheckpointError(
                f"{checkpoint.path} was read without the adapter {adapter}; "
                "name it when it is read."
            )
        return checkpoint
    path = _located(checkpoint, without=(f"{LORA_FOLDER}/*",))
    if adapter is not None:
        return _read_adapted(path, _located(adapter, without=(MAIN_WEIGHTS,)))
    if holds_weights(path):
        if (path / LORA_FOLDER / ADAPTER_CONFIG).is_file():
            _log.info(
                "%s is loaded with its weights as they are; OpenVLA-OFT merges %s into them",
                path,
                LORA_FOLDER,
            )
        return _read(path, None, None)
    path = _located(checkpoint)
    found = find_adapter(path)
    return _read(path, None, None) if found is None else _read_adapted(_base_of(found), path)


def _read_adapted(base: Path, folder: Path) -> PublicFolder:
    """Combine a base with the adapter in `folder`, and with the parts and small files around it."""
    adapter = find_adapter(folder)
    if adapter is None:
        raise CheckpointError(
            f"{folder} has no adapter; expected {ADAPTER_CONFIG} in it, or in its {LORA_FOLDER}."
        )
    beside = adapter.path.parent if adapter.path.name == LORA_FOLDER else adapter.path
    if beside == base:
        raise CheckpointError(
            f"the weights of {base} have the adapter in its {LORA_FOLDER} merged in already, as "
            "OpenVLA-OFT saves them; leave the adapter out, or name it together with the "
            "checkpoint that it was trained on."
        )
    return _read(base, adapter, beside)


def _read(path: Path, adapter: PeftAdapter | None, beside: Path | None) -> PublicFolder:
    refuse_adapter_beside(path)
    require_same_tokens_and_images(path)
    folders = (path,) if beside is None else (beside, path)
    files: dict[str, bytes] = {}
    for folder in reversed(folders):
        files |= _small_files(folder, adapter)
    config = _folder_of_file(CONFIG_FILE, folders) / CONFIG_FILE
    public = read_public_config(config.parent)
    if TOKENIZER_FILE not in files:
        raise CheckpointError(f"{path} has no {TOKENIZER_FILE}; expected one beside {CONFIG_FILE}.")
    extension = read_extension(_folder_of_file(EXTENSION_FILE, folders))
    if adapter is not None and extension.lora is not None:
        raise CheckpointError(
            f"{path} was saved here with adapters of its own; merge them before adding another one."
        )
    index = (path / INDEX_FILE).read_bytes() if (path / INDEX_FILE).is_file() else None
    return PublicFolder(
        path=path,
        public=public,
        extension=extension,
        # what was saved here has the statistics of its training in their own file, whatever the
        # configuration of its base says
        statistics=read_statistics(
            folders, public.norm_stats, config if extension.family is None else None
        ),
        pixels=read_pixel_scaling(folders, public.image_sizes[0]),
        files=files,
        index=index,
        adapter=adapter,
        beside_adapter=beside,
    )


def _small_files(folder: Path, adapter: PeftAdapter | None) -> dict[str, bytes]:
    # what describes the adapter does not describe what it is merged into
    is_adapter = adapter is not None and folder == adapter.path
    without = (ADAPTER_CONFIG, "README.md") if is_adapter else ()
    return companion_files(folder, frozenset(without))


def _folder_of_file(name: str, folders: Sequence[Path]) -> Path:
    return next((folder for folder in folders if (folder / name).is_file()), folders[-1])


def _base_of(adapter: PeftAdapter) -> Path:
    """Return the checkpoint that an adapter was trained on.

    Raises: CheckpointError if it cannot be found or fetched.
    """
    base = adapter.base or ""
    snapshot = _SNAPSHOT.fullmatch(base)
    wanted = (
        f"{snapshot[1]}/{snapshot[2]}" if snapshot is not None and not Path(base).is_dir() else base
    )
    try:
        return _located(wanted, without=(f"{LORA_FOLDER}/*",))
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter.path} is an adapter that was trained on {base!r}, which cannot be found "
            "here; load the checkpoint that it was trained on, and name the adapter beside it "
            "(adapter, --adapter)."
        ) from error


def _located(checkpoint: Path | str, without: Sequence[str] = ()) -> Path:
    path = Path(checkpoint).expanduser()
    if str(checkpoint) and path.is_dir():
        return path.resolve()
    if isinstance(checkpoint, str) and HUB_ID.fullmatch(checkpoint):
        return downloaded(checkpoint, without=without)
    raise CheckpointError(
        f"{checkpoint} is neither a folder nor a hub id such as openvla/openvla-7b."
    )
