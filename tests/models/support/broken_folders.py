"""Ten ways to break a folder of LeRobot's pi0.5, each of which other loaders take in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pi_folders import (
    NORMALIZER,
    UNNORMALIZER,
    change_json,
    change_step,
    change_tensors,
    rename_tensors,
    statistics,
)

from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.flow.robot_checks import check_widths

CONFIG, PREPROCESSOR = "config.json", "policy_preprocessor.json"
Break = Callable[[Path], Any]


def load_for_robot(folder: Path) -> PiParts:
    """Load a folder for LIBERO's robot: actions of 7 numbers, states of 8."""
    parts = load_pi(folder)
    check_widths(parts.settings, 7, 8)
    return parts


def set_statistics(value: float, other: float) -> Break:
    """Return a change that sets centres and lower ends, and spreads and upper ends, to one number each."""

    def change(folder: Path) -> None:
        names = {
            "mean": value,
            "q01": value,
            "min": value,
            "std": other,
            "q99": other,
            "max": other,
        }
        for file in (NORMALIZER, UNNORMALIZER):
            change_tensors(
                folder / file,
                **{
                    f"{feature}.{name}": torch.full((width,), number)
                    for feature, width in (("observation.state", 8), ("action", 7))
                    for name, number in names.items()
                },
            )

    return change


def set_width(feature: str, width: int) -> Break:
    """Return a change that gives a feature another width, everywhere."""

    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        group = "output_features" if feature == "action" else "input_features"
        config[group][feature]["shape"] = [width]
        change_json(folder / CONFIG, **config)
        wide = {
            f"{feature}.{name}": torch.from_numpy(vector).float()
            for name, vector in statistics(width, 3).items()
        }
        for file in (NORMALIZER, UNNORMALIZER):
            change_tensors(folder / file, **wide)

    return change


BROKEN: dict[str, tuple[Break, str]] = {
    "statistics absent": (
        lambda folder: change_step(folder, PREPROCESSOR, "normalizer_processor", state_file=None),
        r"no statistics \(state_file\)",
    ),
    "statistics initial": (set_statistics(0.0, 1.0), "at their initial values"),
    "statistics constant": (set_statistics(0.3, 0.3), "constant in all 8 used numbers"),
    "kind": (
        lambda folder: [
            change_tensors(
                folder / NORMALIZER,
                **dict.fromkeys((f"observation.state.{name}" for name in ("q01", "q99")), None),
            )
        ],
        "to be normalised by QUANTILES, but its statistics lack q01 and q99",
    ),
    "prefix": (
        lambda folder: rename_tensors(folder / "model.safetensors", "model.", "module.model."),
        r"begin with 'module\.model\.', expected 'model\.'",
    ),
    "missing": (
        lambda folder: change_tensors(folder / "model.safetensors", model__time_mlp_out__bias=None),
        r"tensors of /.* do not fit .*1 missing: time_mlp_out\.bias",
    ),
    "surplus": (
        lambda folder: change_tensors(
            folder / "model.safetensors", model__state_head__weight=torch.ones(2)
        ),
        r"1 unknown: state_head\.weight",
    ),
    "horizon": (
        lambda folder: change_json(folder / CONFIG, n_action_steps=6),
        "6 rows of each chunk are to be executed, but a chunk has 5",
    ),
    "widths": (
        lambda folder: set_width("observation.state", 10)(folder),
        "state has 10 numbers, but the robot's has 8",
    ),
    "unmasked rows": (
        lambda folder: set_width("action", 32)(folder),
        "32 is the padded width.* never masked",
    ),
}
"""What ten folders have wrong, and the words of their refusal."""
