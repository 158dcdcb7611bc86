"""openpi's PyTorch folders: five fields of configuration, and statistics below `assets`.

    config.json                       action_dim, action_horizon, paligemma_variant, action_expert_variant, precision
    assets/<asset id>/norm_stats.json {"norm_stats": {"state": {mean, std, q01, q99}, "actions": ...}}

Neither the model nor the kind of normalisation stands in it. The tensors say which model it is, and the
model which kind openpi uses: pi0 mean and standard deviation, pi0.5 quantiles (openpi's
`DataConfigFactory`). Cameras have openpi's three names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.folder_settings import (
    CONFIG_FILE,
    FolderSettings,
    get_count,
    read_object,
    require_horizon,
    require_widths,
)
from vla_rl.models.flow.normalization import (
    NormalizationKind,
    Normalizer,
    Statistics,
    count_used,
    require_usable,
)
from vla_rl.models.small_files import companion_files
from vla_rl.util.foreign_data import find_files
from vla_rl.util.values import excerpt

ASSETS: Final = "assets"
STATISTICS_FILE: Final = "norm_stats.json"
CAMERAS: Final = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
KINDS: Final[Mapping[str, NormalizationKind]] = {"pi0": "MEAN_STD", "pi05": "QUANTILES"}


def read_openpi_folder(
    folder: Path, model: str, asset: str | None = None, num_executed: int | None = None
) -> FolderSettings:
    """Read all but the weights.

    Args:
        folder: the checkpoint.
        model: pi0 or pi05, as its tensors say.
        asset: name of the set of statistics, if there are several.
        num_executed: rows of a chunk to execute; None: all.

    Raises: CheckpointError naming the file and the field that is missing or unusable.
    """
    path = folder / CONFIG_FILE
    config = read_object(path)
    horizon = get_count(config, "action_horizon", path)
    require_horizon(num_executed or horizon, horizon, path)
    padded = get_count(config, "action_dim", path, 32)
    file = find_statistics(folder, asset)
    features = _read_statistics(file)
    kind = KINDS[model]
    widths: dict[str, int] = {}
    for name in ("state", "actions"):
        statistics = features.get(name, {})
        widths[name] = max(1, count_used(statistics))
        require_usable(name, kind, statistics, widths[name], str(file))
    require_widths(widths["actions"], widths["state"], padded, file)
    vision = config.get("vision_config")
    heads = vision.get("num_attention_heads") if isinstance(vision, dict) else None
    return FolderSettings(
        project="openpi",
        model=None,
        horizon=horizon,
        num_executed=num_executed or horizon,
        num_steps=10,
        action_dim=widths["actions"],
        state_dim=widths["state"],
        padded_dim=padded,
        cameras=CAMERAS,
        sources={},
        state=Normalizer(kind, features["state"], "openpi"),
        action=Normalizer(kind, features["actions"], "openpi"),
        prompt_length=None,
        tokenizer=None,
        num_vision_heads=heads if type(heads) is int else None,
        files=companion_files(folder),
    )


def find_statistics(folder: Path, asset: str | None) -> Path:
    """Return the file of statistics.

    Raises: CheckpointError if there is none, or several and none was chosen.
    """
    root = folder / ASSETS
    # an asset's name may hold slashes, such as physical-intelligence/libero
    found = {
        path.parent.relative_to(root).as_posix(): path
        for path in find_files(root, f"**/{STATISTICS_FILE}")
    }
    if asset is None and len(found) == 1:
        return next(iter(found.values()))
    if asset is not None and asset in found:
        return found[asset]
    wanted = f"no {asset!r}" if asset is not None else "none" if not found else "several"
    raise CheckpointError(
        f"{folder} has {wanted} among its statistics, {ASSETS}/<asset id>/{STATISTICS_FILE}; it has "
        f"{sorted(found)}. Copy the assets that openpi saved beside the weights, and name one of "
        "several (norm_key)."
    )


def _read_statistics(path: Path) -> dict[str, Statistics]:
    held = read_object(path).get("norm_stats")
    if not isinstance(held, dict):
        raise CheckpointError(
            f"{path}: norm_stats is {excerpt(held)}, expected the statistics of state and actions."
        )
    return {
        str(name): {
            str(field): _read_vector(vector, f"{path}: {name}.{field}")
            for field, vector in fields.items()
            if vector is not None
        }
        for name, fields in held.items()
        if isinstance(fields, dict)
    }


def _read_vector(values: Any, source: str) -> np.ndarray:
    try:
        vector = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source} is {excerpt(values)}, expected a list of numbers."
        ) from error
    if vector.ndim != 1 or not len(vector):
        raise CheckpointError(f"{source} has the shape {list(vector.shape)}, expected one vector.")
    return vector
