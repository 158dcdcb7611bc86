"""A checkpoint folder in the public layout, read except for its weights.

It is one folder, or two if its weights are a base and a peft adapter: then parts and small files
beside the adapter take precedence over the base's. Python files beside the weights are copied as
bytes and never imported. Nothing is written into the folder; a trained policy is saved to a new
one.

A checkpoint's own processor is described in `preprocessor_config.json`. Its colour means and
deviations are used. Size, interpolation and crop are compared with the image pipelines here; a
checkpoint with other values is rejected, because it would see images that it was not trained on.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.adapters import LORA_FOLDER, PeftAdapter, find_adapter
from vla_rl.models.prismatic.config import PUBLIC_PIXELS, Normalization, PixelScaling
from vla_rl.models.prismatic.conventions import (
    CheckpointFormat,
    Conventions,
    resolve_conventions,
)
from vla_rl.models.prismatic.public_config import (
    CONFIG_FILE,
    EXTENSION_FILE,
    TOKENIZER_FILE,
    Extension,
    PublicConfig,
    read_extension,
    read_public_config,
    resolve_setting,
    shared_config,
    stored_conventions,
)
from vla_rl.models.prismatic.statistics import StatisticsSets, choose_key, read_statistics
from vla_rl.models.small_files import companion_files, require_same_tokens_and_images
from vla_rl.models.tensor_reading import INDEX_FILE, holds_weights, locate
from vla_rl.models.weight_files import ADAPTER_CONFIG, MAIN_WEIGHTS, refuse_extra_adapter
from vla_rl.util.values import excerpt

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
NUM_TOWERS: Final = 2

BICUBIC: Final = (3, "bicubic")
"""Pillow's number for the filter, and timm's name for it."""


KNOWN_FIELDS: Final = frozenset({
    "_auto_class", "_processor_class", "_valid_processor_keys", "auto_map", "feature_extractor_type",
    "image_processor_type", "image_resize_strategy", "input_sizes", "interpolations", "means", "processor_class",
    "stds", "transformers_version", "tvf_crop_params", "tvf_do_letterbox", "tvf_letterbox_fill",
    "tvf_normalize_params", "tvf_resize_params", "use_fused_vision_backbone",
})  # fmt: skip
"""Fields that are compared or used, or that change no pixel."""

USUAL_VALUES: Final[Mapping[str, Any]] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
    "rescale_factor": 1 / 255,
}  # fmt: skip
"""Values of transformers' own fields that say what is done here anyway."""


def read_pixel_scaling(folders: Sequence[Path], image_size: int) -> PixelScaling:
    """Read the colour constants of both towers from the first folder that has the file; without
    one, the public ones.

    Args:
        folders: the checkpoint's folders.
        image_size: side in pixels that its `config.json` names.

    Raises: CheckpointError naming the field that differs from the pipelines here, with both values.
    """
    path = next(
        (path for folder in folders if (path := folder / PREPROCESSOR_FILE).is_file()), None
    )
    if path is None:
        return PUBLIC_PIXELS
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        _require_known_values(fields, image_size, path)
        _require_no_other_fields(fields, path)
        return _pixel_scaling(fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the settings of an image processor: {error}"
        ) from error


def _require_known_values(fields: dict[str, Any], size: int, path: Path) -> None:
    for name, found, known in _compared_fields(fields, size):
        if found not in known:
            raise CheckpointError(
                f"{path}: {name} is {found!r}, expected {known[0]!r}: the towers would see other "
                "images than they were trained with."
            )


def _require_no_other_fields(fields: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a field that is not known here sets something."""
    for name, value in fields.items():
        is_plain = value in (None, USUAL_VALUES[name]) if name in USUAL_VALUES else not value
        if name not in KNOWN_FIELDS and not is_plain:
            raise CheckpointError(
                f"{path}: {name} is {excerpt(value)}, which is not read here; expected it to be "
                "absent, because the towers may see other images than they were trained with. "
                "Remove it if it changes no pixel."
            )


def _compared_fields(
    fields: dict[str, Any], size: int
) -> Iterable[tuple[str, Any, tuple[Any, ...]]]:
    """Return (name, value, supported values) of each field that the file has."""
    square, towers = [size, size], range(NUM_TOWERS)
    whole: dict[str, tuple[Any, ...]] = {
        "use_fused_vision_backbone": (True,),
        "image_resize_strategy": ("resize-naive",),
        "tvf_do_letterbox": (False,),
        "input_sizes": ([[3, *square]] * NUM_TOWERS,),
        "interpolations": (["bicubic"] * NUM_TOWERS,),
    }
    of_a_tower: dict[str, dict[str, tuple[Any, ...]]] = {
        "tvf_resize_params": {
            "size": (square,),
            "interpolation": BICUBIC,
            "antialias": (True,),
            "max_size": (None,),
        },
        "tvf_crop_params": {"output_size": (square, size)},
    }
    yield from ((name, fields[name], known) for name, known in whole.items() if name in fields)
    for name, inner in of_a_tower.items():
        if name not in fields:
            continue
        yield f"the length of {name}", len(fields[name]), (NUM_TOWERS,)
        for tower in towers:
            held = fields[name][tower]
            yield from (
                (f"{name}[{tower}].{field}", held[field], known)
                for field, known in inner.items()
                if field in held
            )


def _pixel_scaling(fields: dict[str, Any]) -> PixelScaling:
    """Return the constants that the checkpoint's own processor applies: those of
    `tvf_normalize_params`, if it has any.
    """
    if "tvf_normalize_params" in fields:
        means, stds = (
            [tower[kind] for tower in fields["tvf_normalize_params"]] for kind in ("mean", "std")
        )
    elif "means" in fields and "stds" in fields:
        means, stds = fields["means"], fields["stds"]
    else:
        return PUBLIC_PIXELS
    return msgspec.convert({"means": means, "stds": stds}, PixelScaling)


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

    parts_folder: Path | None = None
    """Folder of the parts and small files that were trained together with the adapter."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Folders of parts and small files; an earlier one takes precedence."""
        return (self.path,) if self.parts_folder is None else (self.parts_folder, self.path)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer's file."""
        return _find_folder(TOKENIZER_FILE, self.folders) / TOKENIZER_FILE

    @property
    def all_files(self) -> tuple[Path, ...]:
        """Every file, including the adapter's."""
        owners = dict.fromkeys((*self.folders, *([self.adapter.path] if self.adapter else [])))
        return tuple(file for owner in owners for file in sorted(owner.iterdir()) if file.is_file())


def resolve_fields(
    folder: PublicFolder, format: CheckpointFormat, without: Collection[str]
) -> tuple[dict[str, Any], Conventions]:
    """Return the fields that the configurations of both families share, and the conventions.

    Args:
        folder: the checkpoint.
        format: fills in what its files leave out.
        without: fields of the conventions that the family does not have.

    Raises: CheckpointError if it lacks the statistics, or has other settings than the requested ones.
    """
    extension, path = folder.extension, folder.path
    # A wrong set of statistics costs tens of points without an error, so none is guessed.
    key = choose_key(folder.statistics, format.norm_key or extension.norm_key, path)
    scale: Normalization = resolve_setting(
        path, "normalization", extension.normalization, format.normalization, "bounds_q99"
    )
    conventions = resolve_conventions(
        path, stored_conventions(extension), format.convention, without=without
    )
    dtype = conventions.rope_inv_freq_dtype
    fields = shared_config(folder.public, extension, folder.tokenizer_file, folder.pixels, dtype)
    fields |= {"images": conventions.images, "norm_key": key, "normalization": scale}
    return fields, conventions


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
    path = locate(checkpoint, without=(f"{LORA_FOLDER}/*",))
    if adapter is not None:
        return _read_adapted(path, locate(adapter, without=(MAIN_WEIGHTS,)))
    # Weights beside lora_adapter have it merged in already: adding it once more would double it.
    if holds_weights(path):
        if (path / LORA_FOLDER / ADAPTER_CONFIG).is_file():
            _log.info(
                "%s is loaded with its weights as they are; OpenVLA-OFT merges %s into them",
                path,
                LORA_FOLDER,
            )
        return _read_folder(path, None, None)
    path = locate(checkpoint)
    found = find_adapter(path)
    return (
        _read_folder(path, None, None) if found is None else _read_adapted(_find_base(found), path)
    )


def _read_adapted(base: Path, folder: Path) -> PublicFolder:
    """Combine a base with the adapter in `folder`, and with the parts and small files around it."""
    adapter = find_adapter(folder)
    if adapter is None:
        raise CheckpointError(
            f"{folder} has no adapter; expected {ADAPTER_CONFIG} in it, or in its {LORA_FOLDER}."
        )
    parts_folder = adapter.path.parent if adapter.path.name == LORA_FOLDER else adapter.path
    if parts_folder == base:
        raise CheckpointError(
            f"the weights of {base} have the adapter in its {LORA_FOLDER} merged in already, as "
            "OpenVLA-OFT saves them; leave the adapter out, or name it together with the "
            "checkpoint that it was trained on."
        )
    return _read_folder(base, adapter, parts_folder)


def _read_folder(
    path: Path, adapter: PeftAdapter | None, parts_folder: Path | None
) -> PublicFolder:
    refuse_extra_adapter(path)
    require_same_tokens_and_images(path)
    folders = (path,) if parts_folder is None else (parts_folder, path)
    files: dict[str, bytes] = {}
    # The adapter's files come last and win: its tokenizer and statistics are those of its
    # training.
    for folder in reversed(folders):
        files |= _small_files(folder, adapter)
    config = _find_folder(CONFIG_FILE, folders) / CONFIG_FILE
    public = read_public_config(config.parent)
    if TOKENIZER_FILE not in files:
        raise CheckpointError(f"{path} has no {TOKENIZER_FILE}; expected one beside {CONFIG_FILE}.")
    extension = read_extension(_find_folder(EXTENSION_FILE, folders))
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
        parts_folder=parts_folder,
    )


def _small_files(folder: Path, adapter: PeftAdapter | None) -> dict[str, bytes]:
    # what describes the adapter does not describe what it is merged into
    is_adapter = adapter is not None and folder == adapter.path
    without = (ADAPTER_CONFIG, "README.md") if is_adapter else ()
    return companion_files(folder, frozenset(without))


def _find_folder(name: str, folders: Sequence[Path]) -> Path:
    return next((folder for folder in folders if (folder / name).is_file()), folders[-1])


def _find_base(adapter: PeftAdapter) -> Path:
    """Return the checkpoint that an adapter was trained on.

    Raises: CheckpointError if it cannot be found or fetched.
    """
    base = adapter.base or ""
    # Training wrote the path of its own hub cache, which names the repository on any machine.
    snapshot = _SNAPSHOT.fullmatch(base)
    wanted = (
        f"{snapshot[1]}/{snapshot[2]}" if snapshot is not None and not Path(base).is_dir() else base
    )
    try:
        return locate(wanted, without=(f"{LORA_FOLDER}/*",))
    except CheckpointError as error:
        raise CheckpointError(
            f"{adapter.path} is an adapter that was trained on {base!r}, which cannot be found "
            "here; load the checkpoint that it was trained on, and name the adapter beside it "
            "(adapter, --adapter)."
        ) from error
