"""Small flow policies: made with random weights, saved to a folder, loaded again.

config.json          sizes, cameras, statistics of actions and state, the chain
model.safetensors    the parameters, under the names of `SmallFlowNetwork`
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.device_lane import to_device
from vla_rl.errors import CheckpointError
from vla_rl.models.flow.config import FlowSampling, apply_options
from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import MAX_WORDS, NUM_HASHES, SmallFlowConfig, SmallFlowNetwork
from vla_rl.models.observed_values import describe_array
from vla_rl.models.prismatic.action_tokens import ActionScaler
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.small_files import companion_files
from vla_rl.models.weight_files import check_names, read_weights
from vla_rl.types import Config, Observation

CONFIG_FILE: Final = "config.json"
MODEL_TYPE: Final = "vla_rl_flow"
STATE_KEY: Final = "state"


class SmallFlowFile(Config, frozen=True, kw_only=True):
    """Contents of `config.json`."""

    policy: SmallFlowConfig
    """Inputs, outputs, sizes."""

    sampling: FlowSampling
    """The chain from noise to actions."""

    model_type: str = MODEL_TYPE
    """Name of the format."""

    def __post_init__(self) -> None:
        self.require(self.model_type == MODEL_TYPE, "model_type", repr(MODEL_TYPE))


@dataclass(frozen=True)
class SmallFlowProcessor:
    """Conversions of one small policy. It is a `FlowProcessor`."""

    config: SmallFlowConfig

    @property
    def action_dim(self) -> int:
        """Numbers of the robot's action."""
        return self.config.actions.action_dim

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Observation keys of the images."""
        return self.config.cameras

    @property
    def image_size(self) -> int:
        """Pixels along each side of an image."""
        return self.config.image_size

    @property
    def fixed_image_size(self) -> int:
        """Images are not resized."""
        return self.image_size

    @property
    def padded_dim(self) -> None:
        """Actions are as wide as the robot's."""
        return

    @property
    def state_size(self) -> int | None:
        """Numbers of the state; None if it is not read."""
        return self.config.state_size

    @property
    def state_offsets(self) -> int:
        """Actions are no offsets."""
        return 0

    def prepare(self, observations: Sequence[Observation], device: torch.device) -> FlowInputs:
        """Prepare one row for each observation, on `device`.

        Raises: ValueError naming the key of an observation that does not suit the policy.
        """
        words = [_hash_words(_get_instruction(each)) for each in observations]
        ids = np.zeros((len(words), max(map(len, words))), np.int64)
        is_word = np.zeros(ids.shape, np.bool_)
        for row, hashed in enumerate(words):
            ids[row, : len(hashed)], is_word[row, : len(hashed)] = hashed, True
        frames = np.stack(
            [[self._frame(each, key) for key in self.camera_keys] for each in observations]
        )
        is_there = np.array([[key in each for key in self.camera_keys] for each in observations])
        # bytes cross to the device, a quarter of the floats
        pixels = to_device(torch.from_numpy(frames), device).permute(0, 1, 4, 2, 3)
        seen, tokens, mask = (
            to_device(torch.from_numpy(each), device) for each in (is_there, ids, is_word)
        )
        states = to_device(torch.from_numpy(self._states(observations)), device)
        return FlowInputs(pixels.float() / 127.5 - 1.0, seen, tokens, mask, states)

    def identify(self, observation: Observation) -> tuple[object, ...]:
        """Return a value that is equal for two observations only if `prepare` treats them alike."""
        keys = (
            *self.camera_keys,
            "instruction",
            *(() if self.state_size is None else (STATE_KEY,)),
        )
        values = [observation.get(key) for key in keys]
        return tuple(
            (value.tobytes(), value.shape, value.dtype.str)
            if isinstance(value, np.ndarray)
            else value
            for value in values
        )

    def action_origins(self, observations: Sequence[Observation]) -> None:
        """Return None: nothing is added to actions."""
        return

    def normalise_actions(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions [B, H, D] to [-1, 1], float32; those outside the statistics are clipped."""
        return ActionScaler(self.config.actions).to_unit(actions).astype(np.float32)

    def restore_actions(self, numbers: np.ndarray) -> np.ndarray:
        """Convert numbers float32 [B, H, D], clipped to [-1, 1], to the environment's units."""
        return ActionScaler(self.config.actions).from_unit(np.clip(numbers, -1.0, 1.0))

    def _frame(self, observation: Observation, key: str) -> np.ndarray:
        frame, size = observation.get(key), self.config.image_size
        shape = (size, size, 3)
        if frame is None and key not in observation and key in self.config.optional_cameras:
            return np.zeros(shape, np.uint8)
        if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.shape == shape:
            return frame
        known = ", ".join(self.camera_keys)
        raise ValueError(
            f"observation[{key!r}] is {describe_array(frame)}, expected uint8 {list(shape)} (RGB, channels last); "
            f"the policy reads the cameras {known} at {size} pixels, and the observation's keys are "
            f"{sorted(observation)}. Render images of that size, under these names."
        )

    def _states(self, observations: Sequence[Observation]) -> np.ndarray:
        statistics = self.config.state
        if statistics is None:
            return np.zeros((len(observations), 0), np.float32)
        states = [observation.get(STATE_KEY) for observation in observations]
        for state in states:
            if not isinstance(state, np.ndarray) or state.shape != (len(statistics.mean),):
                raise ValueError(
                    f"observation[{STATE_KEY!r}] is {describe_array(state)}, expected float32 "
                    f"[{len(statistics.mean)}], as many numbers as the policy's statistics have."
                )
        centred = np.stack([np.asarray(state, np.float64) for state in states]) - statistics.mean
        scaled: np.ndarray = centred / np.array(statistics.std)
        return scaled.astype(np.float32)


@dataclass(frozen=True)
class SmallFlowLayout:
    """The files of one small policy. It is a `FlowLayout`.

    Attributes:
        file: contents of `config.json`.
        others: small files of the folder that was loaded.
    """

    file: SmallFlowFile
    others: Mapping[str, bytes] = field(default_factory=dict)

    def write_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return every parameter by its name; views, not copies."""
        return dict(network.state_dict())

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into a network.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        check_names(network.state_dict(), tensors)
        network.load_state_dict(dict(tensors))

    def encode_files(self, sampling: FlowSampling) -> Mapping[str, bytes]:
        """Return `config.json`, and the other small files."""
        file = msgspec.structs.replace(self.file, sampling=sampling)
        text = msgspec.json.format(msgspec.json.encode(file), indent=1)
        return {**self.others, CONFIG_FILE: text}


def create_small_flow(
    config: SmallFlowConfig, seed: int, sampling: FlowSampling | None = None
) -> FlowPolicy:
    """Create a policy with random weights from `seed`; torch's own random state is left unchanged."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = SmallFlowNetwork(config)
    file = SmallFlowFile(policy=config, sampling=sampling or FlowSampling())
    return _assemble(network, file, {})


def load_small_flow(
    folder: Path, sampling: FlowSampling | None = None, device: torch.device | str = "cpu"
) -> FlowPolicy:
    """Read a folder that `FlowPolicy.save` wrote.

    Args:
        folder: the checkpoint.
        sampling: another chain than the folder's.
        device: device of the parameters.

    Raises: CheckpointError naming what is missing, unknown or damaged.
    """
    try:
        file = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=SmallFlowFile)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} is not a small flow policy's checkpoint: {CONFIG_FILE} cannot be read: {error}; "
            "choose another one."
        ) from error
    tensors, others = read_weights(folder), companion_files(folder)
    if sampling is not None:
        file = msgspec.structs.replace(file, sampling=sampling)
    with torch.random.fork_rng():
        network = SmallFlowNetwork(file.policy)
    policy = _assemble(network.to(device), file, others)
    policy.load_checkpoint_tensors(tensors)
    return policy


def load_small_family(folder: Path, format: CheckpointFormat, device: torch.device) -> FlowPolicy:
    """Load a folder for the table of families; of the format, options of the chain are read."""
    policy = load_small_flow(folder, device=device)
    return policy.with_sampling(apply_options(policy.config.sampling, format))


def _assemble(
    network: SmallFlowNetwork, file: SmallFlowFile, others: Mapping[str, bytes]
) -> FlowPolicy:
    processor, layout = SmallFlowProcessor(file.policy), SmallFlowLayout(file, others)
    return FlowPolicy(network, processor, layout, file.sampling)


def _get_instruction(observation: Observation) -> str:
    instruction = observation.get("instruction")
    if not isinstance(instruction, str) or not 1 <= len(instruction.split()) <= MAX_WORDS:
        raise ValueError(
            f"observation['instruction'] is {instruction!r}, expected the task in 1 to {MAX_WORDS} words; "
            f"the observation's keys are {sorted(observation)}."
        )
    return instruction


@lru_cache(maxsize=1024)
def _hash_words(instruction: str) -> tuple[int, ...]:
    words = instruction.lower().split()
    return tuple(zlib.crc32(word.encode()) % NUM_HASHES**2 for word in words)
