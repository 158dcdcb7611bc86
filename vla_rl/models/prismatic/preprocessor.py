"""`preprocessor_config.json` of a checkpoint: how its own processor converts a picture to numbers.

Its colour means and deviations are used. Size, interpolation and crop are compared with the image
pipelines here; a checkpoint with other values is rejected, because it would see pictures that it
was not trained on.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.config import PUBLIC_PIXELS, PixelScaling
from vla_rl.util.values import excerpt

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
NUM_TOWERS: Final = 2

BICUBIC: Final = (3, "bicubic")
"""Pillow's number for the filter, and timm's name for it."""


KNOWN: Final = frozenset({
    "_auto_class", "_processor_class", "_valid_processor_keys", "auto_map", "feature_extractor_type",
    "image_processor_type", "image_resize_strategy", "input_sizes", "interpolations", "means", "processor_class",
    "stds", "transformers_version", "tvf_crop_params", "tvf_do_letterbox", "tvf_letterbox_fill",
    "tvf_normalize_params", "tvf_resize_params", "use_fused_vision_backbone",
})  # fmt: skip
"""Fields that are compared or used, or that change no pixel."""

USUAL: Final[Mapping[str, Any]] = {
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
        _require_known(fields, image_size, path)
        _require_no_others(fields, path)
        return _pixel_scaling(fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the settings of an image processor: {error}"
        ) from error


def _require_known(fields: dict[str, Any], size: int, path: Path) -> None:
    for name, found, known in _compared(fields, size):
        if found not in known:
            raise CheckpointError(
                f"{path}: {name} is {found!r}, expected {known[0]!r}: the towers would see other "
                "pictures than they were trained with."
            )


def _require_no_others(fields: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError if a field that is not known here sets something."""
    for name, value in fields.items():
        is_plain = value in (None, USUAL[name]) if name in USUAL else not value
        if name not in KNOWN and not is_plain:
            raise CheckpointError(
                f"{path}: {name} is {excerpt(value)}, which is not read here; expected it to be "
                "absent, because the towers may see other pictures than they were trained with. "
                "Remove it if it changes no pixel."
            )


def _compared(fields: dict[str, Any], size: int) -> Iterable[tuple[str, Any, tuple[Any, ...]]]:
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
