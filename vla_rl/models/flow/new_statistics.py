"""Give a folder of openpi or LeRobot the statistics of other data, to fine-tune it for them.

    openpi      assets/<asset id>/norm_stats.json
    LeRobot     config.json: widths of state and action; processors: features, files of statistics

The kind of normalisation stays: it is the one that the policy was trained with. The copy links to the
weights of the folder, so it takes no room.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from safetensors.torch import save

from vla_rl.errors import CheckpointError, ConfigError, DataError
from vla_rl.models.flow.folder_settings import CONFIG_FILE, get_count, read_object
from vla_rl.models.flow.lerobot_folder import (
    ACTION,
    NORMALIZER,
    POSTPROCESSOR,
    PREPROCESSOR,
    STATE,
    UNNORMALIZER,
    is_lerobot_folder,
)
from vla_rl.models.flow.loading import FLOW_FILE
from vla_rl.models.flow.openpi_folder import ASSETS, STATISTICS_FILE
from vla_rl.models.small_files import companion_files

DataStatistics: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]
"""Statistics of `state` and `action`: mean, std, min, max, q01, q99 of each number."""

OWN_ASSET: Final = "own"
"""Asset id of statistics that are written for openpi's layout."""


def copy_with_statistics(folder: Path, target: Path, statistics: DataStatistics) -> Path:
    """Write a copy of a folder with other statistics, and links to its weights; return it.

    Args:
        folder: openpi's or LeRobot's.
        target: a new folder.
        statistics: of the data that the policy is to be fine-tuned on.

    Raises: CheckpointError if a file of the folder cannot be read, or its network is too narrow for the data;
    ConfigError if the folder is neither openpi's nor LeRobot's; DataError for data without a state.
    """
    config = read_object(folder / CONFIG_FILE)
    is_lerobots = is_lerobot_folder(config)
    if not is_lerobots and "action_horizon" not in config:
        raise ConfigError(
            f"statistics is 'data', but {folder} is neither openpi's nor LeRobot's, whose statistics can be "
            "replaced; expected 'policy', or a new policy with the statistics of the data (leave out --from)"
        )
    if "state" not in statistics:
        raise DataError(
            "the demonstrations have no state, and the policy reads one; map the data's name (--data.fields), "
            "or use other data"
        )
    _require_room(config, folder, statistics)
    files = companion_files(folder)
    if is_lerobots:
        files |= _lerobot_files(folder, statistics)
    else:
        files = {name: held for name, held in files.items() if not name.startswith(f"{ASSETS}/")}
        named = {"state": statistics["state"], "actions": statistics["action"]}
        written = {"norm_stats": {name: _openpi_fields(each) for name, each in named.items()}}
        files[f"{ASSETS}/{OWN_ASSET}/{STATISTICS_FILE}"] = _encode(written)
    if FLOW_FILE in files:
        # the set of statistics that it names is not there any more, and the data's actions are no offsets
        kept = read_object(folder / FLOW_FILE)
        files[FLOW_FILE] = _encode(kept | {"norm_key": None, "state_offsets": None})
    target.mkdir(parents=True)
    for name, held in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(held)
    for path in folder.iterdir():
        is_weights = path.suffix == ".safetensors" or path.name.endswith(".index.json")
        if is_weights and not (target / path.name).exists():
            os.symlink(path.resolve(), target / path.name)
    return target


def _require_room(config: Mapping[str, Any], folder: Path, statistics: DataStatistics) -> None:
    """Raise CheckpointError if the data's state or action is wider than the network pads it."""
    path = folder / CONFIG_FILE
    for feature in ("state", "action"):
        width = len(statistics[feature]["mean"])
        # openpi has one width for both
        padded = get_count(
            config, f"max_{feature}_dim", path, get_count(config, "action_dim", path, 32)
        )
        if width > padded:
            raise CheckpointError(
                f"the {feature} of the demonstrations has {width} numbers, expected at most {padded}, the "
                f"width to which the network of {folder} pads it; take a wider network, or other data."
            )


def _openpi_fields(statistics: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: list(statistics[name]) for name in ("mean", "std", "q01", "q99")}


def _lerobot_files(folder: Path, statistics: DataStatistics) -> dict[str, bytes]:
    """Return `config.json`, both processors and their statistics, changed for the data."""
    features = {STATE: statistics["state"], ACTION: statistics["action"]}
    widths = {name: len(next(iter(each.values()))) for name, each in features.items()}
    config = read_object(folder / CONFIG_FILE)
    config["input_features"] = _resize(config.get("input_features"), widths, STATE, "STATE")
    config["output_features"] = _resize(config.get("output_features"), widths, ACTION, "ACTION")
    flat = {
        f"{feature}.{name}": torch.from_numpy(np.asarray(values, np.float32))
        for feature, each in features.items()
        for name, values in each.items()
    }
    files = {CONFIG_FILE: _encode(config)}
    steps = ((PREPROCESSOR, NORMALIZER), (POSTPROCESSOR, UNNORMALIZER))
    for file, step in steps:
        processor, state_file = _restate(folder / file, step, widths)
        files |= {file: _encode(processor), state_file: save(flat)}
    return files


def _resize(features: Any, widths: Mapping[str, int], name: str, kind: str) -> dict[str, Any]:
    """Return features of a configuration or processor with the width of one of them replaced."""
    held = dict(features) if isinstance(features, dict) else {}
    return held | {name: {"type": kind, "shape": [widths[name]]}}


def _restate(path: Path, step: str, widths: Mapping[str, int]) -> tuple[dict[str, Any], str]:
    """Return a processor for features of these widths, and the name of its file of statistics."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, which names the kind of normalisation; copy it from the folder that "
            "LeRobot saved."
        )
    processor = read_object(path)
    found = [
        each
        for each in processor.get("steps") or ()
        if isinstance(each, dict) and each.get("registry_name") == step
    ]
    if not found:
        raise CheckpointError(f"{path} has no step {step!r}, expected one that normalises.")
    settings = found[0].setdefault("config", {})
    features = settings.get("features") or {}
    settings["features"] = {
        name: {**each, "shape": [widths[name]]} if name in widths else each
        for name, each in features.items()
    }
    number = processor["steps"].index(found[0])
    default = f"{path.stem}_step_{number}_{step}.safetensors"
    state_file = found[0].setdefault("state_file", None) or default
    found[0]["state_file"] = state_file
    return processor, str(state_file)


def _encode(held: dict[str, Any]) -> bytes:
    return json.dumps(held, indent=2).encode()
