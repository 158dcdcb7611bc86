"""Writes tiny folders of pi0 and pi0.5 as openpi and LeRobot lay them out, without any of our model code; breaks them
in ten ways, each of which other loaders take in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_flow
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from vla_rl.models.flow.pi import PiKind
from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.flow.robot_checks import check_widths

STATE_DIM, ACTION_DIM, HORIZON = 8, 7, 5
VISION = {"num_attention_heads": 4}
WEIGHTS = "model.safetensors"
NORMALIZER = "policy_preprocessor_step_5_normalizer_processor.safetensors"
PROMPT_STEPS: dict[PiKind, str] = {
    "pi0": "pi0_new_line_processor",
    "pi05": "pi05_prepare_state_tokenizer_processor_step",
}
UNNORMALIZER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes, whose texts begin with `<bos>` as PaliGemma's do."""
    special = ["<pad>", "<eos>", "<bos>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def statistics(width: int, seed: int) -> dict[str, np.ndarray]:
    """Return statistics of plausible data."""
    rng = np.random.default_rng(seed)
    centre, spread = rng.uniform(-0.3, 0.3, width), rng.uniform(0.2, 0.6, width)
    return {
        "mean": centre,
        "std": spread,
        "q01": centre - 2 * spread,
        "q99": centre + 2 * spread,
        "min": centre - 3 * spread,
        "max": centre + 3 * spread,
    }


def write_openpi(folder: Path, kind: PiKind) -> Path:
    """Write a folder as openpi's PyTorch trainer does."""
    folder.mkdir(parents=True)
    tensors = golden_flow.golden_weights(f"{kind}_openpi")
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    config: dict[str, Any] = {
        "action_dim": 32,
        "action_horizon": HORIZON,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "float32",
        "vision_config": VISION,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    assets = folder / "assets" / "physical-intelligence" / "libero"
    assets.mkdir(parents=True)
    features = {"state": statistics(STATE_DIM, 0), "actions": statistics(ACTION_DIM, 1)}
    names = ("mean", "std", "q01", "q99")
    held = {
        name: {each: vectors[each].tolist() for each in names} for name, vectors in features.items()
    }
    (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": held}, indent=2))
    write_tokenizer(folder)
    return folder


def lerobot_tensors(kind: PiKind) -> dict[str, Tensor]:
    """Return the tensors that LeRobot's module saves: its prefix, two heads, 32 padded numbers."""
    shapes = golden_flow.golden_names(kind)
    for name in ("action_in_proj.weight", "state_proj.weight"):
        if name in shapes:
            shapes[name] = [shapes[name][0], 32]
    shapes["action_out_proj.weight"], shapes["action_out_proj.bias"] = [32, 32], [32]
    tensors = {name: golden_flow.weight_by_formula(name, shape) for name, shape in shapes.items()}
    both = "paligemma_with_expert"
    table = tensors[f"{both}.paligemma.model.language_model.embed_tokens.weight"]
    tensors[f"{both}.paligemma.lm_head.weight"] = table.clone()
    tensors[f"{both}.gemma_expert.lm_head.weight"] = golden_flow.weight_by_formula(
        "head", [300, 32]
    )
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def write_lerobot(folder: Path, kind: PiKind, normalization: str | None = None) -> Path:
    """Write a folder as LeRobot's `save_pretrained` does, with both processors."""
    folder.mkdir(parents=True)
    save_file(lerobot_tensors(kind), folder / WEIGHTS, {"format": "pt"})
    mode = normalization or ("MEAN_STD" if kind == "pi0" else "QUANTILES")
    mapping = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    image = {"type": "VISUAL", "shape": [3, 64, 64]}
    inputs = {
        "observation.images.image": image,
        "observation.images.image2": image,
        "observation.state": {"type": "STATE", "shape": [STATE_DIM]},
    }
    outputs = {"action": {"type": "ACTION", "shape": [ACTION_DIM]}}
    config = {
        "type": kind,
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "normalization_mapping": mapping,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "dtype": "float32",
        "chunk_size": HORIZON,
        "n_action_steps": HORIZON,
        "max_state_dim": 32,
        "max_action_dim": 32,
        "num_inference_steps": 10,
        "use_relative_actions": False,
        "tokenizer_max_length": 48 if kind == "pi0" else 200,
        "vision_config": VISION,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    _write_processors(folder, kind, inputs, outputs, mapping)
    write_tokenizer(folder)
    return folder


def _write_processors(
    folder: Path,
    kind: PiKind,
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    mapping: dict[str, str],
) -> None:
    tokenizer = {
        "max_length": 48 if kind == "pi0" else 200,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": "google/paligemma-3b-pt-224",
    }
    normalise = {"eps": 1e-8, "features": inputs | outputs, "norm_map": mapping}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": PROMPT_STEPS[kind], "config": {}},
        {"registry_name": "tokenizer_processor", "config": tokenizer},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
        {
            "registry_name": "normalizer_processor",
            "config": normalise,
            "state_file": NORMALIZER,
        },
    ]
    after = [
        {
            "registry_name": "unnormalizer_processor",
            "config": normalise | {"features": outputs},
            "state_file": UNNORMALIZER,
        },
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    for name, steps in (("preprocessor", before), ("postprocessor", after)):
        held = {"name": f"policy_{name}", "steps": steps}
        (folder / f"policy_{name}.json").write_text(json.dumps(held, indent=2))
    flat = {
        f"{feature}.{name}": torch.from_numpy(vector).float()
        for feature, width, seed in (
            ("observation.state", STATE_DIM, 0),
            ("action", ACTION_DIM, 1),
        )
        for name, vector in statistics(width, seed).items()
    }
    for file in (NORMALIZER, UNNORMALIZER):
        save_file(flat, folder / file)


def change_json(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON object; None removes one."""
    held = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in held.items() if value is not None}))


def change_step(folder: Path, file: str, step: str, **settings: Any) -> None:
    """Replace settings of a processor's step, or its `state_file`; None removes one."""
    path = folder / file
    held = json.loads(path.read_text())
    for each in held["steps"]:
        if each["registry_name"] == step:
            if "state_file" in settings:
                each["state_file"] = settings["state_file"]
            for name, value in settings.items():
                each["config"][name] = value
            if each.get("state_file") is None:
                each.pop("state_file", None)
    path.write_text(json.dumps(held))


def change_tensors(path: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a file by name, dots written as two underscores; None removes one."""
    held = load_file(path)
    for name, tensor in changes.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, path, {"format": "pt"})


def rename_tensors(path: Path, old: str, new: str) -> None:
    """Replace the prefix of every tensor of a file."""
    held = {new + name.removeprefix(old): tensor for name, tensor in load_file(path).items()}
    save_file(held, path, {"format": "pt"})


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
