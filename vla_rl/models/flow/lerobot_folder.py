"""LeRobot's folders: `config.json` and two processors with their statistics.

    config.json                        type, features, normalization_mapping, chunk_size, n_action_steps, ...
    policy_preprocessor.json           steps: rename, prompt, tokenizer, normalise; each may name a state file
    policy_postprocessor.json          steps: undo the normalisation of actions
    ..._normalizer_processor.safetensors      statistics: `observation.state.mean`, `action.q01`, ...

Every small file is kept byte by byte. What two files state differently is refused.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import numpy as np

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.folder_settings import (
    CONFIG_FILE,
    FIXED,
    FIXED_STEPS,
    FolderSettings,
    get_count,
    name_unknown,
    read_object,
    require_fixed,
    require_horizon,
    require_widths,
)
from vla_rl.models.flow.normalization import (
    FIELDS,
    LEROBOT_EPSILON,
    NormalizationKind,
    Normalizer,
    Statistics,
    parse_kind,
    require_usable,
)
from vla_rl.models.small_files import companion_files
from vla_rl.models.tensor_reading import read_tensors
from vla_rl.util.foreign_data import find_files, get_text, reading
from vla_rl.util.values import compare_sources, excerpt

PREPROCESSOR: Final = "policy_preprocessor.json"
POSTPROCESSOR: Final = "policy_postprocessor.json"
NORMALIZER: Final = "normalizer_processor"
UNNORMALIZER: Final = "unnormalizer_processor"
STATE: Final = "observation.state"
ACTION: Final = "action"

OF_ONE_KIND: Final = (
    NORMALIZER,
    UNNORMALIZER,
    "tokenizer_processor",
    "rename_observations_processor",
)
"""Steps that are read, of which a processor has one each."""

STEPS: Final = frozenset(
    {
        *OF_ONE_KIND,
        "device_processor",
        "to_batch_processor",
        "pi0_new_line_processor",
        "smolvla_new_line_processor",
        "pi05_prepare_state_tokenizer_processor_step",
        "relative_actions_processor",
        "absolute_actions_processor",
    }
)
"""Steps of LeRobot's processors of these policies; what any other one changes is not computed here."""


class NormalizationStep(NamedTuple):
    """A step of a processor that scales features.

    Attributes:
        kinds: kind of normalisation by the type of a feature, as it is written.
        epsilon: small divisor.
        statistics: vectors by feature, then by name.
    """

    kinds: Mapping[str, Any]
    epsilon: float
    statistics: Mapping[str, Statistics]


def is_lerobot_folder(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is LeRobot's."""
    return "normalization_mapping" in config or "input_features" in config


def read_lerobot_folder(folder: Path) -> FolderSettings:
    """Read all but the weights.

    Raises: CheckpointError naming the file and the field that is missing, unusable, or stated
    differently by two files.
    """
    with reading(
        folder / CONFIG_FILE,
        "the configuration of LeRobot's policy, beside its processors",
        "copy the folder that LeRobot saved",
        error=CheckpointError,
    ):
        return _read_settings(folder)


def _read_settings(folder: Path) -> FolderSettings:
    path = folder / CONFIG_FILE
    config = read_object(path)
    steps, after = _read_steps(folder / PREPROCESSOR), _read_steps(folder / POSTPROCESSOR)
    require_fixed(config, FIXED, str(path))
    name_unknown(config, path)
    state_dim, action_dim = (
        _feature_width(config, path, STATE),
        _feature_width(config, path, ACTION),
    )
    padded = get_count(config, "max_action_dim", path, 32)
    require_widths(action_dim, 1, padded, path)
    require_widths(1, state_dim, get_count(config, "max_state_dim", path, 32), path)
    horizon = get_count(config, "chunk_size", path)
    num_executed = get_count(config, "n_action_steps", path, horizon)
    require_horizon(num_executed, horizon, path)
    tokenizer = steps.get("tokenizer_processor", {})
    renamed = steps.get("rename_observations_processor", {}).get("rename_map") or {}
    return FolderSettings(
        project="lerobot",
        model=config.get("type"),
        horizon=horizon,
        num_executed=num_executed,
        num_steps=get_count(
            config, "num_inference_steps", path, get_count(config, "num_steps", path, 10)
        ),
        action_dim=action_dim,
        state_dim=state_dim,
        padded_dim=padded,
        cameras=_camera_names(config, path),
        sources={new: old for old, new in renamed.items()},
        state=_read_normalizer(folder, config, steps, ("STATE", STATE, state_dim)),
        action=_read_action_normalizer(folder, config, steps, after, action_dim),
        prompt_length=_prompt_length(config, tokenizer, folder),
        tokenizer=tokenizer.get("tokenizer_name"),
        num_vision_heads=(config.get("vision_config") or {}).get("num_attention_heads"),
        files=companion_files(folder) | _statistics_files(folder),
    )


def _read_steps(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of a processor's steps by their registered names, with `state_file`."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, which holds the policy's normalisation; copy it from the folder that "
            "LeRobot saved, or save the policy with its processors (make_pre_post_processors)."
        )
    steps = read_object(path).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise CheckpointError(f"{path}: steps is {excerpt(steps)}, expected a list of objects.")
    found: dict[str, dict[str, Any]] = {}
    for step in steps:
        name = _step_name(step, path)
        settings = step.get("config") or {}
        if name in found and name in OF_ONE_KIND:
            raise CheckpointError(
                f"{path} has two steps {name!r}, expected one; LeRobot would run both. Remove one."
            )
        require_fixed(settings, FIXED_STEPS, f"{path}, {name}")
        found[name] = {**settings, "state_file": step.get("state_file")}
    return found


def _step_name(step: Mapping[str, Any], path: Path) -> str:
    """Return the registered name of a step.

    Raises: CheckpointError for a step that LeRobot would run and that is not known here.
    """
    # without a registered name, it is a class of the user's own, which is not run here
    field = "registry_name" if "registry_name" in step else "class"
    name = get_text(step, field, str(path), error=CheckpointError)
    if name not in STEPS:
        raise CheckpointError(
            f"{path} has a step {excerpt(name)}, which is not computed here, expected steps out of "
            f"{', '.join(sorted(STEPS))}; remove it from the file if the policy sees and does the same "
            "without it."
        )
    return name


def _prompt_length(
    config: Mapping[str, Any], tokenizer: Mapping[str, Any], folder: Path
) -> int | None:
    for fields, name, file in (
        (tokenizer, "max_length", PREPROCESSOR),
        (config, "tokenizer_max_length", CONFIG_FILE),
    ):
        if name in fields:
            return get_count(fields, name, folder / file)
    return None


def _feature_width(config: Mapping[str, Any], path: Path, name: str) -> int:
    group = "output_features" if name == ACTION else "input_features"
    shape = ((config.get(group) or {}).get(name) or {}).get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 1:
        raise CheckpointError(
            f"{path}: the shape of {name} in {group} is {excerpt(shape)}, expected one width, such as [7]."
        )
    return shape[0]


def _camera_names(config: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    features = config.get("input_features") or {}
    cameras = tuple(
        name
        for name, each in features.items()
        if isinstance(each, dict) and each.get("type") == "VISUAL"
    )
    if not cameras:
        raise CheckpointError(f"{path}: input_features has no image, expected one of type VISUAL.")
    kind = (config.get("normalization_mapping") or {}).get("VISUAL", "IDENTITY")
    if kind != "IDENTITY":
        raise CheckpointError(
            f"{path}: images are to be normalised by {kind!r}, expected IDENTITY: flow policies see "
            "numbers from -1 to 1."
        )
    return cameras


def _read_step(
    folder: Path, name: str, steps: Mapping[str, dict[str, Any]], file: str
) -> NormalizationStep:
    path = folder / file
    if name not in steps:
        raise CheckpointError(
            f"{path} has no step {name!r}, expected one with the policy's statistics; without it states "
            "and actions are passed on unscaled."
        )
    settings = steps[name]
    state_file = settings.get("state_file")
    if state_file is None:
        raise CheckpointError(
            f"{path}: the step {name!r} has no statistics (state_file), expected those of the training "
            "data; the policy was saved without them, and would pass on states and actions unscaled."
        )
    if not isinstance(state_file, str) or PurePath(state_file).name != state_file:
        raise CheckpointError(
            f"{path}: state_file is {excerpt(state_file)}, expected a name in {folder}."
        )
    if not (folder / state_file).is_file():
        raise CheckpointError(f"{folder / state_file} is missing, which {file} names; copy it too.")
    statistics: dict[str, dict[str, np.ndarray]] = {}
    for flat, tensor in read_tensors(folder / state_file).items():
        feature, _, statistic = flat.rpartition(".")
        statistics.setdefault(feature, {})[statistic] = tensor.float().numpy()
    return NormalizationStep(
        settings.get("norm_map") or {}, float(settings.get("eps", LEROBOT_EPSILON)), statistics
    )


def _read_normalizer(
    folder: Path,
    config: Mapping[str, Any],
    steps: Mapping[str, dict[str, Any]],
    feature: tuple[str, str, int],
    file: str = PREPROCESSOR,
) -> Normalizer:
    kind_of, name, width = feature
    step_name = NORMALIZER if file == PREPROCESSOR else UNNORMALIZER
    step = _read_step(folder, step_name, steps, file)
    configured = (config.get("normalization_mapping") or {}).get(kind_of)
    used = step.kinds.get(kind_of)
    if configured is not None and used is not None:
        compare_sources(
            f"the kind of normalisation of {name} in {folder}",
            (CONFIG_FILE, configured),
            (file, used),
            remedy="keep the one that the policy was trained with in both",
        )
    # LeRobot passes a feature on unscaled if its processor names no kind, whatever config.json says.
    kind: NormalizationKind = parse_kind(used, name, str(folder / file))
    if name == STATE:
        _require_scaled(steps[step_name], kind_of, folder / file)
    statistics = {
        key: value for key, value in step.statistics.get(name, {}).items() if value.ndim == 1
    }
    require_usable(name, kind, statistics, width, str(folder / file))
    for statistic in FIELDS[kind]:
        if len(statistics[statistic]) != width:
            raise CheckpointError(
                f"{folder / file}: the {statistic} of {name} has {len(statistics[statistic])} numbers, "
                f"expected the {width} of {CONFIG_FILE}; the statistics are of another robot."
            )
    return Normalizer(kind, statistics, "lerobot", step.epsilon)


def _require_scaled(settings: Mapping[str, Any], kind_of: str, path: Path) -> None:
    """Raise CheckpointError if LeRobot would pass on the state unscaled, because the step leaves it out."""
    features, keys = settings.get("features"), settings.get("normalize_observation_keys")
    listed = features.get(STATE) if isinstance(features, dict) else {"type": kind_of}
    if not isinstance(listed, dict) or listed.get("type") != kind_of:
        raise CheckpointError(
            f"{path}: the features of {NORMALIZER!r} have {excerpt(listed)} for {STATE}, expected the type "
            f"{kind_of}; LeRobot scales a state only if it is listed there. Save the policy's processors anew."
        )
    if isinstance(keys, list) and STATE not in keys:
        raise CheckpointError(
            f"{path}: normalize_observation_keys is {excerpt(keys)}, expected {STATE} among them; the state "
            "would be passed on unscaled. Save the policy's processors anew."
        )


def _read_action_normalizer(
    folder: Path,
    config: Mapping[str, Any],
    steps: Mapping[str, dict[str, Any]],
    after: Mapping[str, dict[str, Any]],
    width: int,
) -> Normalizer:
    """Return the normalisation of actions, which both processors have to state alike."""
    feature = ("ACTION", ACTION, width)
    back = _read_normalizer(folder, config, after, feature, POSTPROCESSOR)
    forth = _read_normalizer(folder, config, steps, feature)
    compare_sources(
        f"the kind of normalisation of {ACTION} in {folder}",
        (PREPROCESSOR, forth.kind),
        (POSTPROCESSOR, back.kind),
        remedy="copy both processors from the folder that LeRobot saved",
    )
    for name in FIELDS[back.kind]:
        compare_sources(
            f"the {name} of {ACTION} in {folder}",
            (PREPROCESSOR, forth.statistics[name].tolist()),
            (POSTPROCESSOR, back.statistics[name].tolist()),
            remedy="copy both processors from the folder that LeRobot saved",
        )
    return back


def _statistics_files(folder: Path) -> dict[str, bytes]:
    """Read the statistics beside the processors, which end as weights do."""
    pattern = "policy_*processor*.safetensors"
    return {path.name: path.read_bytes() for path in find_files(folder, pattern) if path.is_file()}
