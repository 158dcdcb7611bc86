"""LeRobot's folders of SmolVLA, to a network with its conversions, and back under the same names.

    config.json             sizes, features, `vlm_model_name`
    policy_*processor*      normalisation and prompt, as `lerobot_folder` reads them
    model.safetensors       model.vlm_with_expert.{vlm,lm_expert}.*, model.state_proj.*, ...

LeRobot takes the sizes of the language model, which its folders do not hold, from `vlm_model_name`: a
folder or a hub id. Here `vlm_config.json` in the folder comes before both, and a saved folder has it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.folder_settings import (
    CONFIG_FILE,
    FolderSettings,
    read_object,
    require_horizon,
    require_widths,
)
from vla_rl.models.flow.lerobot_folder import read_lerobot_folder
from vla_rl.models.flow.pi_processor import PiProcessor, choose_cameras
from vla_rl.models.flow.pi_prompt import (
    TOKENIZER_FILE,
    PiTokenizer,
    find_tokenizer_folder,
    read_tokenizer,
)
from vla_rl.models.flow.smolvla import SmolVlaConfig, SmolVlaNetwork
from vla_rl.models.prismatic.trunk import materialise
from vla_rl.models.tensor_reading import iterate_tensors, list_some, tensor_files, tensor_shapes
from vla_rl.models.weight_files import check_names, check_weights
from vla_rl.util.arrays import require_finite
from vla_rl.util.values import excerpt

PREFIX: Final = "model."
ANCHOR: Final = "vlm_with_expert."
"""Beginning of names that no other flow policy has."""

HEAD: Final = "vlm_with_expert.vlm.lm_head.weight"
"""The language model's head: nothing computes with it, and it is carried along."""

VLM_FILE: Final = "vlm_config.json"
PROMPT_LENGTH: Final = 48
DEFAULT_IMAGE: Final = (512, 512)
TABLE: Final = "vlm_with_expert.vlm.model.text_model.embed_tokens.weight"

SIZES: Final = (
    *("num_vlm_layers", "num_expert_layers", "self_attn_every_n_layers", "attention_mode"),
    *("expert_width_multiplier", "add_image_special_tokens", "prefix_length"),
    *("min_period", "max_period", "max_state_dim", "max_action_dim", "chunk_size"),
)
"""Fields of LeRobot's `config.json` that the network needs."""


@dataclass(frozen=True)
class SmolVlaLayout:
    """The names of LeRobot's tensors, and a folder's small files; with a chain, a
    `FlowLayout` (`loading.FolderLayout`).

    Attributes:
        unused: tensors that are carried along, by their names in the folder.
        files: small files by relative name.
    """

    unused: Mapping[str, Tensor] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def write_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return every parameter under its name in the folder; views, not copies."""
        own = {PREFIX + name: tensor for name, tensor in network.state_dict().items()}
        return own | dict(self.unused)

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the folder's names into a network.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        own = self.write_tensors(network)
        check_names(own, tensors)
        with torch.no_grad():
            for name in own.keys() - self.unused.keys():
                own[name].copy_(tensors[name])


class SmolVlaParts(NamedTuple):
    """A folder's policy, in the parts that a `FlowPolicy` takes.

    Attributes:
        network: with the folder's weights, in their stored dtypes.
        processor: conversions of observations and actions.
        layout: names of tensors and small files, to write the folder again.
        settings: what the folder states.
    """

    network: SmolVlaNetwork
    processor: PiProcessor
    layout: SmolVlaLayout
    settings: FolderSettings


def is_smolvla(names: Collection[str]) -> bool:
    """Return whether tensors are SmolVLA's, by their names, whatever prefix these have."""
    return any(ANCHOR in name for name in names)


def load_smolvla(
    folder: Path,
    *,
    num_executed: int | None = None,
    cameras: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
) -> SmolVlaParts:
    """Load a folder.

    Args:
        folder: the checkpoint.
        num_executed: rows of a chunk to execute; None: as the folder says.
        cameras: observation key of each of the folder's cameras; None: by their names.
        device: device of the parameters.

    Raises: CheckpointError naming what is missing, unusable or contradictory; ConfigError for cameras
    that do not fit the folder's.
    """
    config = read_object(folder / CONFIG_FILE)
    shapes = tensor_shapes(folder, tensor_files(folder))
    _require_prefix(shapes, folder)
    settings = read_lerobot_folder(folder)
    executed = num_executed or settings.num_executed
    require_horizon(executed, settings.horizon, folder)
    settings = replace(settings, num_executed=executed)
    size, files = _read_size(config, folder)
    require_widths(settings.action_dim, 0, size.max_action_dim, folder)
    require_widths(0, settings.state_dim, size.max_state_dim, folder)
    try:
        with torch.device("meta"):
            network = SmolVlaNetwork(size)
    except ConfigError as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    processor = _make_processor(folder, config, size, settings, cameras)
    unused = _load_tensors(network, shapes, folder, torch.device(device))
    materialise(network, torch.device(device))
    layout = SmolVlaLayout(unused, {**files, **settings.files})
    return SmolVlaParts(network.eval(), processor, layout, settings)


def _require_prefix(names: Collection[str], folder: Path) -> None:
    found = sorted({name.partition(ANCHOR)[0] for name in names if ANCHOR in name})
    if found != [PREFIX]:
        raise CheckpointError(
            f"the tensors of {folder} begin with {list_some(found)}, expected {PREFIX!r} alone, as "
            "LeRobot's SmolVLA has it; a loader that matches names would leave weights random."
        )


def _read_size(config: Mapping[str, Any], folder: Path) -> tuple[SmolVlaConfig, dict[str, bytes]]:
    """Return the network's sizes, and the language model's files that a folder needs to stand alone."""
    paths = {name: folder / name for name in (VLM_FILE, TOKENIZER_FILE)}
    if not all(path.is_file() for path in paths.values()):
        named = find_tokenizer_folder(folder, _name_vlm(config, folder))
        stored = {VLM_FILE: named / CONFIG_FILE, TOKENIZER_FILE: named / TOKENIZER_FILE}
        paths = {name: path if path.is_file() else stored[name] for name, path in paths.items()}
    path = paths[VLM_FILE]
    vlm = read_object(path)
    if not isinstance(vlm.get("text_config"), dict):
        raise CheckpointError(
            f"{path} has no text_config, expected the config.json of the SmolVLM that {CONFIG_FILE} of "
            f"{folder} names (vlm_model_name)."
        )
    tokens: tuple[int, int] = (0, 0)
    if config.get("add_image_special_tokens"):
        tokenizer = read_tokenizer(folder, _name_vlm(config, folder), 1 << 30)
        marks = [
            tokenizer.token_to_id(mark) for mark in ("<fake_token_around_image>", "<global-img>")
        ]
        if None in marks:
            raise CheckpointError(
                f"{folder}: add_image_special_tokens is on, and its tokenizer has no such tokens."
            )
        tokens = (int(marks[0] or 0), int(marks[1] or 0))
    fields = {name: config[name] for name in SIZES if name in config}
    try:
        size = msgspec.convert({**fields, "vlm": vlm, "image_tokens": tokens}, SmolVlaConfig)
    except (msgspec.ValidationError, ConfigError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: {error}") from error
    return size, {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def _name_vlm(config: Mapping[str, Any], folder: Path) -> str:
    name = config.get("vlm_model_name")
    if not isinstance(name, str):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: vlm_model_name is {excerpt(name)}, expected the folder or hub id of "
            "the SmolVLM that the policy was made from."
        )
    return name


def _make_processor(
    folder: Path,
    config: Mapping[str, Any],
    size: SmolVlaConfig,
    settings: FolderSettings,
    cameras: Sequence[str] | None,
) -> PiProcessor:
    wanted = config.get("resize_imgs_with_padding", DEFAULT_IMAGE)
    if not isinstance(wanted, list | tuple) or len(set(wanted)) != 1 or type(wanted[0]) is not int:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: resize_imgs_with_padding is {excerpt(wanted)}, expected a square, "
            "such as [512, 512]."
        )
    vocabulary = int(size.vlm["text_config"].get("vocab_size", 0))
    tokenizer = read_tokenizer(folder, _name_vlm(config, folder), vocabulary)
    length = settings.prompt_length or PROMPT_LENGTH
    return PiProcessor(
        # the prompt of LeRobot's pi0 and of SmolVLA is the instruction and a line break
        "pi0",
        settings,
        choose_cameras(settings, cameras),
        PiTokenizer(tokenizer, length),
        wanted[0],
        size.max_state_dim,
        padding="left_top",
    )


def _load_tensors(
    network: SmolVlaNetwork, shapes: Mapping[str, list[int]], folder: Path, device: torch.device
) -> dict[str, Tensor]:
    """Assign a folder's tensors, each in its stored dtype; return those that are carried along.

    Raises: CheckpointError for damaged files, and for missing, surplus or misshapen tensors.
    """
    carried = {PREFIX + HEAD}
    own = {PREFIX + name: tensor for name, tensor in network.state_dict().items()}
    with torch.device("meta"):
        held = {name: torch.empty(shape) for name, shape in shapes.items() if name not in carried}
    check_names(own, held, folder)
    check_weights(folder)
    found: dict[str, Tensor] = {}
    files = tensor_files(folder)
    for file in dict.fromkeys(files.values()):
        names = [name for name in files if files[name] == file]
        for name, tensor in iterate_tensors(folder / file, names):
            require_finite({name: tensor}, folder)
            found[name] = tensor
    unused = {name: found.pop(name) for name in carried & set(found)}
    loaded = {name.removeprefix(PREFIX): tensor.to(device) for name, tensor in found.items()}
    network.load_state_dict(loaded, assign=True)
    return unused
