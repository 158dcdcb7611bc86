"""Folders of pi0, pi0.5 and SmolVLA as policies, for the table of families.

    folder of another project ─► parts ─► FlowPolicy ─► the same files, and vla_rl_flow.json

`vla_rl_flow.json` holds what the other project's files do not say: the chain from noise to actions, and the
options that the folder was read with. Every process that is given a saved folder alone (an evaluator, a
rank, another host) reads it as the process that saved it did.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.config import FlowSampling, apply_options
from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.flow.pi_tensors import PiLayout
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.smolvla_folder import SmolVlaLayout, SmolVlaParts, load_smolvla
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.types import Config, NonNegativeInt, PositiveInt

FLOW_FILE: Final = "vla_rl_flow.json"

OPTIONS: Final = ("cameras", "norm_key", "chunk_size", "state_in_prompt", "state_offsets")
"""Fields of `CheckpointFormat` that are kept with a folder."""


class FlowFile(Config, frozen=True, kw_only=True):
    """Contents of `vla_rl_flow.json`; None: as the other project's files say."""

    cameras: tuple[str, ...] | None = None
    """Observation key of each of the folder's cameras, `none` for one that the robot does not have."""

    norm_key: str | None = None
    """Set of statistics below `assets`, in openpi's folders."""

    chunk_size: PositiveInt | None = None
    """Rows of a chunk that are executed."""

    state_in_prompt: bool | None = None
    """Whether pi0.5 reads the state in its prompt."""

    state_offsets: NonNegativeInt | None = None
    """First numbers of an action that are offsets from the state."""

    sampling: FlowSampling | None = None
    """The chain from noise to actions."""


@dataclass(frozen=True)
class FolderLayout:
    """Another project's layout with `vla_rl_flow.json` beside its files. It is a `FlowLayout`.

    Attributes:
        inner: names of tensors, and the other project's small files.
        file: options that the folder was read with.
    """

    inner: PiLayout | SmolVlaLayout
    file: FlowFile

    def write_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return every parameter under its name in the folder."""
        return self.inner.write_tensors(network)

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the folder's names into a network. Raises: CheckpointError."""
        self.inner.read_tensors(network, tensors)

    def encode_files(self, sampling: FlowSampling) -> Mapping[str, bytes]:
        """Return the small files of the folder by name."""
        file = msgspec.structs.replace(self.file, sampling=sampling)
        text = msgspec.json.format(msgspec.json.encode(file), indent=1)
        return {**self.inner.files, FLOW_FILE: text}


def read_flow_file(folder: Path, format: CheckpointFormat) -> FlowFile:
    """Return the options for a folder: those that are set, else those that it was saved with.

    Raises: CheckpointError if its file cannot be read.
    """
    path, stored = folder / FLOW_FILE, FlowFile()
    if path.is_file():
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=FlowFile)
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error}; remove it to read the folder as its other files say."
            ) from error
    given = {name: getattr(format, name) for name in OPTIONS}
    return msgspec.structs.replace(
        stored, **{name: value for name, value in given.items() if value is not None}
    )


def load_pi_policy(folder: Path, format: CheckpointFormat, device: torch.device) -> FlowPolicy:
    """Load a folder of pi0 or pi0.5.

    Raises: CheckpointError and ConfigError as `load_pi`.
    """
    file = read_flow_file(folder, format)
    parts = load_pi(
        folder,
        asset=file.norm_key,
        num_executed=file.chunk_size,
        cameras=file.cameras,
        state_in_prompt=file.state_in_prompt,
        state_offsets=file.state_offsets,
        device=device,
    )
    return _make_policy(parts, file, format)


def load_smolvla_policy(folder: Path, format: CheckpointFormat, device: torch.device) -> FlowPolicy:
    """Load a folder of SmolVLA.

    Raises: CheckpointError and ConfigError as `load_smolvla`.
    """
    file = read_flow_file(folder, format)
    parts = load_smolvla(folder, num_executed=file.chunk_size, cameras=file.cameras, device=device)
    return _make_policy(parts, file, format)


def _make_policy(
    parts: PiParts | SmolVlaParts, file: FlowFile, format: CheckpointFormat
) -> FlowPolicy:
    network: Any = parts.network
    if format.torch_dtype is not None:
        network = network.to(format.torch_dtype)
    stored = file.sampling or FlowSampling(num_steps=parts.settings.num_steps)
    sampling = apply_options(stored, format)
    layout = FolderLayout(parts.layout, file)
    return FlowPolicy(network, parts.processor, layout, sampling, parts.settings.num_executed)
