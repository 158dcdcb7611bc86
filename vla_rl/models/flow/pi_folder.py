"""Folders of pi0 and pi0.5, from openpi or LeRobot, to a network with its conversions.

    config.json ─► whose layout ─► names of tensors ─► which model ─► statistics, processors ─► sizes ─► weights

All that can be refused is refused from headers and small files, before any weight is read.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.folder_settings import (
    CONFIG_FILE,
    FolderSettings,
    read_object,
    require_fixed,
    require_horizon,
    require_widths,
)
from vla_rl.models.flow.lerobot_folder import is_lerobot_folder, read_lerobot_folder
from vla_rl.models.flow.normalization import Project
from vla_rl.models.flow.openpi_folder import ASSETS, read_openpi_folder
from vla_rl.models.flow.pi import TIME_PERIODS, PiNetwork, PiSize
from vla_rl.models.flow.pi_processor import PiProcessor, make_processor
from vla_rl.models.flow.pi_prompt import PROMPT_LENGTHS, PiTokenizer, read_tokenizer
from vla_rl.models.flow.pi_tensors import (
    PiLayout,
    TensorReport,
    inspect_tensors,
    load_tensors,
    read_size,
    require_same_names,
)
from vla_rl.models.prismatic.trunk import materialise


class PiParts(NamedTuple):
    """A folder's policy, in the parts that a `FlowPolicy` takes.

    Attributes:
        network: with the folder's weights, in their stored dtypes.
        processor: conversions of observations and actions.
        layout: names of tensors and small files, to write the folder again.
        settings: what the folder states.
    """

    network: PiNetwork
    processor: PiProcessor
    layout: PiLayout
    settings: FolderSettings


def find_project(folder: Path) -> Project:
    """Return whose layout a folder has, by its `config.json`.

    Raises: CheckpointError if it is neither's.
    """
    path = folder / CONFIG_FILE
    if not path.exists() and (folder / ASSETS).is_dir():
        # openpi's `train_pytorch.py` writes none; its conversion of JAX checkpoints does
        raise CheckpointError(
            f"{path} is missing, expected openpi's, which its trainer does not write; write "
            '{"action_dim": 32, "action_horizon": H} into it, with both numbers of the training\'s '
            "model configuration."
        )
    config = read_object(path)
    if is_lerobot_folder(config):
        return "lerobot"
    if "action_horizon" in config:
        return "openpi"
    kind: Any = config.get("model_type")
    raise CheckpointError(
        f"{folder / CONFIG_FILE} is neither openpi's (action_horizon) nor LeRobot's (input_features), "
        + (f"but of transformers' model {kind!r}" if kind else f"it has {sorted(config)[:8]}")
        + "; use a folder that openpi or LeRobot saved, because no other holds the statistics."
    )


def read_settings(
    folder: Path, asset: str | None = None, num_executed: int | None = None
) -> tuple[TensorReport, FolderSettings]:
    """Read and check everything but the weights.

    Args:
        folder: the checkpoint.
        asset: name of openpi's set of statistics, if there are several.
        num_executed: rows of a chunk to execute; None: as the folder says.

    Raises: CheckpointError naming what is missing, unusable or contradictory; ConfigError for an asset of
    LeRobot's folder, which has none.
    """
    project = find_project(folder)
    report = inspect_tensors(folder, project)
    if project == "openpi":
        settings = read_openpi_folder(folder, report.kind, asset, num_executed)
    else:
        if asset is not None:
            raise ConfigError(
                f"norm_key is {asset!r}, but {folder} is LeRobot's, which holds one set of statistics; leave it out"
            )
        settings = read_lerobot_folder(folder)
        path = folder / CONFIG_FILE
        periods = dict(zip(("min_period", "max_period"), TIME_PERIODS, strict=True))
        require_fixed(read_object(path), periods, str(path))
        executed = num_executed or settings.num_executed
        require_horizon(executed, settings.horizon, folder)
        settings = replace(settings, num_executed=executed)
        if settings.model != report.kind:
            # A prompt of the other model's length would be cut, or padded.
            settings = replace(settings, prompt_length=None)
    return report, settings


def load_pi(
    folder: Path,
    *,
    asset: str | None = None,
    num_executed: int | None = None,
    cameras: Sequence[str] | None = None,
    state_in_prompt: bool | None = None,
    state_offsets: int | None = None,
    device: torch.device | str = "cpu",
) -> PiParts:
    """Load a folder.

    Args:
        folder: the checkpoint.
        asset, num_executed: as `read_settings` takes them.
        cameras: observation key of each of the folder's cameras; None: by their names.
        state_in_prompt: whether pi0.5 reads the state in its prompt; None: it does.
        state_offsets: first numbers of an action that are offsets from the state; None: none.
        device: device of the parameters.

    Raises: CheckpointError naming what is missing, unusable or contradictory; ConfigError for cameras
    that do not fit the folder's.
    """
    report, settings = read_settings(folder, asset, num_executed)
    size = read_size(report, settings.horizon, settings.num_vision_heads, folder)
    require_widths(settings.action_dim, 0, size.action_dim, folder)
    require_widths(0, settings.state_dim, size.state_dim, folder)
    with torch.device("meta"):
        network = PiNetwork(size)
    require_same_names(network, report, folder)
    tokenizer = _make_tokenizer(folder, size, settings)
    processor = make_processor(size, settings, tokenizer, cameras, state_in_prompt, state_offsets)
    unused = load_tensors(network, folder, report.layout, torch.device(device))
    materialise(network, torch.device(device))
    layout = replace(report.layout, unused=unused, files=settings.files)
    return PiParts(network.eval(), processor, layout, settings)


def _make_tokenizer(folder: Path, size: PiSize, settings: FolderSettings) -> PiTokenizer:
    tokenizer = read_tokenizer(folder, settings.tokenizer, size.vocabulary)
    return PiTokenizer(tokenizer, settings.prompt_length or PROMPT_LENGTHS[size.kind])
