"""Settings that a flow policy's folder states beside its weights, whichever project wrote it.

    openpi     `config.json` with five fields, `assets/<id>/norm_stats.json`       openpi_folder
    LeRobot    `config.json`, two processors with their statistics                 lerobot_folder

Both are read into `FolderSettings`; the small files are kept byte by byte and written back.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.normalization import Normalizer, Project
from vla_rl.util.foreign_data import reading

CONFIG_FILE: Final = "config.json"


@dataclass(frozen=True)
class FolderSettings:
    """Statements of a folder about its policy, checked as far as the folder alone allows.

    Attributes:
        project: who wrote it, which decides arithmetic, prompts and the resampling of images.
        model: name of the model in the configuration; None if it names none.
        horizon: rows of a chunk, H.
        num_executed: rows of a chunk that are executed before the next decision.
        num_steps: steps of the chain from noise to actions.
        action_dim: numbers of the robot's action, D.
        state_dim: numbers of the robot's state.
        padded_dim: width to which both are padded, as configured.
        cameras: names of the images, in the order in which the network reads them.
        sources: observation key that each camera was renamed from, where the folder says.
        state: normalisation of the state.
        action: normalisation of the action.
        prompt_length: most tokens of a prompt; None if the folder does not say.
        tokenizer: name or folder of the tokenizer; None if the folder does not say.
        num_vision_heads: attention heads of the image tower; None if the folder does not say.
        files: small files by relative name.
    """

    project: Project
    model: str | None
    horizon: int
    num_executed: int
    num_steps: int
    action_dim: int
    state_dim: int
    padded_dim: int
    cameras: tuple[str, ...]
    sources: Mapping[str, str]
    state: Normalizer
    action: Normalizer
    prompt_length: int | None
    tokenizer: str | None
    num_vision_heads: int | None
    files: Mapping[str, bytes]


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: CheckpointError naming the file."""
    with reading(path, "a whole JSON object", "download it again", error=CheckpointError):
        # not msgspec: both projects write NaN and Infinity as well
        held = json.loads(path.read_bytes())
        if not isinstance(held, dict):
            raise ValueError(f"it holds a {type(held).__name__}")
    return held


def get_count(fields: Mapping[str, Any], name: str, path: Path, default: int | None = None) -> int:
    """Return a whole number of at least 1.

    Raises: CheckpointError if it is something else, or is missing without a default.
    """
    value = fields.get(name, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {name} is {value!r}, expected a whole number from 1 on.")
    return value


def require_horizon(num_executed: int, horizon: int, source: object) -> None:
    """Raise CheckpointError if more rows are to be executed than a chunk has."""
    if num_executed > horizon:
        raise CheckpointError(
            f"{source}: {num_executed} rows of each chunk are to be executed, but a chunk has "
            f"{horizon}; execute {horizon} rows at most (n_action_steps in LeRobot's config.json), or "
            "train the policy on longer chunks."
        )


def require_widths(action_dim: int, state_dim: int, padded_dim: int, source: object) -> None:
    """Raise CheckpointError if an action or state is wider than the network's padded width."""
    for name, width in (("action", action_dim), ("state", state_dim)):
        if width > padded_dim:
            raise CheckpointError(
                f"{source}: the {name} has {width} numbers, expected at most {padded_dim}, the width "
                "to which the network pads it; the folder belongs to another robot."
            )
