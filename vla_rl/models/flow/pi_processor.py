"""Conversions between a robot's observations and actions, and the tensors of pi0 and pi0.5.

image, wrist_image ─► resized, padded, [-1, 1]   a camera that the robot lacks is masked
state              ─► normalised ─► padded with zeros; pi0.5 writes it into the prompt
instruction        ─► prompt ─► tokens
chunk of numbers   ─► normalisation undone ─► actions in the environment's units
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vla_rl.engines.device_lane import to_device
from vla_rl.errors import ConfigError
from vla_rl.models.flow.folder_settings import FolderSettings
from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.normalization import Project
from vla_rl.models.flow.pi import PiKind, PiSize
from vla_rl.models.flow.pi_prompt import PiTokenizer, format_pi0, format_pi05
from vla_rl.models.observed_values import describe_array, require_frame, require_instruction
from vla_rl.types import Observation

BLACK: Final = -1.0
"""Black, in numbers from -1 to 1."""

Padding: TypeAlias = Literal["even", "left_top"]
"""Sides on which black pixels are added: two of them evenly, or the left and the upper one."""


def resize_padded(images: Tensor, size: int, project: Project, padding: Padding = "even") -> Tensor:
    """Resize images into a square with their proportions kept, padded with black.

        LeRobot    bilinear in float32, without antialiasing
        openpi     Pillow's bilinear filter on bytes: antialiased, rounded

    Both pad evenly on two sides (openpi's `image_tools.resize_with_pad`); LeRobot's SmolVLA pads on the left
    and above alone (its `resize_with_pad`).

    Args:
        images: uint8 [B, 3, H, W].
        size: S, pixels along a side.
        project: whose resampling.
        padding: where the square is filled up.

    Returns: float32 [B, 3, S, S] in [-1, 1].
    """
    height, width = images.shape[-2:]
    scaled = images
    if (height, width) != (size, size):
        ratio = max(width / size, height / size)
        inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
        scaled = (
            _resize_bytes(images, inner) if project == "openpi" else _resize_plain(images, inner)
        )
    numbers = scaled.float() / 255.0 * 2.0 - 1.0
    missing = [size - length for length in numbers.shape[-2:]]
    top, left = missing if padding == "left_top" else [length // 2 for length in missing]
    below, right = size - numbers.shape[-2] - top, size - numbers.shape[-1] - left
    return functional.pad(numbers, (left, right, top, below), value=BLACK)


def _resize_plain(images: Tensor, inner: tuple[int, int]) -> Tensor:
    return functional.interpolate(images.float(), size=inner, mode="bilinear", align_corners=False)


def _resize_bytes(images: Tensor, inner: tuple[int, int]) -> Tensor:
    floats = functional.interpolate(
        images.float(), size=inner, mode="bilinear", align_corners=False, antialias=True
    )
    return floats.round().clamp(0.0, 255.0).to(torch.uint8)


STATE_KEY: Final = "state"
NO_CAMERA: Final = "none"
"""Name, instead of an observation key, of a camera that the robot does not have."""

NAME_CAMERAS: Final = (
    f"Name the key of each camera (cameras), {NO_CAMERA!r} for one that the robot does not have."
)

KNOWN_CAMERAS: Final[Mapping[str, str]] = {
    "base_0_rgb": "image",
    "left_wrist_0_rgb": "wrist_image",
    "right_wrist_0_rgb": NO_CAMERA,
    "image": "image",
    "image2": "wrist_image",
    "top": "image",
    "wrist": "wrist_image",
}
"""Observation key by the last part of a camera's name: openpi's three, and those of LIBERO's data."""


def choose_cameras(settings: FolderSettings, asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the observation key of each of the folder's cameras, `NO_CAMERA` for none.

    Args:
        settings: the folder's.
        asked: keys in the folder's order; None: by name.

    Raises: ConfigError if another number of them is named, or none is left.
    """
    if asked is not None and len(asked) != len(settings.cameras):
        raise ConfigError(
            f"cameras is {tuple(asked)!r}, expected one observation key for each camera of the folder, "
            f"{', '.join(settings.cameras)}; {NO_CAMERA!r} for one that the robot does not have"
        )
    chosen = tuple(asked) if asked is not None else tuple(map(_guess_key, _sources(settings)))
    if set(chosen) <= {NO_CAMERA}:
        raise ConfigError(
            f"cameras is {chosen!r}, so the policy would see nothing, expected at least one observation "
            "key"
        )
    return chosen


def _sources(settings: FolderSettings) -> list[str]:
    return [settings.sources.get(camera, camera) for camera in settings.cameras]


def _guess_key(camera: str) -> str:
    name = camera.rpartition(".")[2]
    if name.startswith("empty_camera"):
        return NO_CAMERA
    return KNOWN_CAMERAS.get(name, name)


@dataclass(frozen=True)
class PiProcessor:
    """Conversions of one policy. It is a `FlowProcessor`.

    Attributes:
        prompt: whose prompt: pi0's is the instruction, pi05's holds the state too.
        settings: what the folder states.
        cameras: observation key of each camera.
        tokenizer: of prompts.
        image_size: pixels along a side of an image.
        state_width: width to which the state is padded.
        padding: where images are padded.
        state_offsets: first numbers of an action that are offsets from the state.
    """

    prompt: PiKind
    settings: FolderSettings
    cameras: tuple[str, ...]
    tokenizer: PiTokenizer
    image_size: int
    state_width: int
    padding: Padding = "even"
    state_offsets: int = 0

    @property
    def action_dim(self) -> int:
        """Numbers of the robot's action."""
        return self.settings.action_dim

    @property
    def fixed_image_size(self) -> None:
        """Images of any size are resized."""
        return

    @property
    def padded_dim(self) -> int:
        """Width to which the folder pads actions."""
        return self.settings.padded_dim

    @property
    def camera_keys(self) -> tuple[str, ...]:
        """Observation keys of the images, without cameras that the robot does not have."""
        return tuple(key for key in self.cameras if key != NO_CAMERA)

    @property
    def state_size(self) -> int:
        """Numbers of the robot's state."""
        return self.settings.state_dim

    def prepare(self, observations: Sequence[Observation], device: torch.device) -> FlowInputs:
        """Prepare one row for each observation, on `device`.

        Raises: ValueError naming the key of an observation that does not suit the policy.
        """
        states = self.settings.state.normalise(
            np.stack([self._state(each) for each in observations])
        )
        prompts = [
            self._prompt(require_instruction(each), state)
            for each, state in zip(observations, states, strict=True)
        ]
        ids, mask = self.tokenizer.encode(prompts)
        padded = np.zeros((len(states), self.state_width), np.float32)
        padded[:, : states.shape[1]] = states
        images, image_mask = self._images(observations, device)
        return FlowInputs(
            images,
            image_mask,
            to_device(torch.from_numpy(ids), device),
            to_device(torch.from_numpy(mask), device),
            to_device(torch.from_numpy(padded), device),
        )

    def identify(self, observation: Observation) -> tuple[object, ...]:
        """Return a value that is equal for two observations only if `prepare` treats them alike."""
        values = [observation.get(key) for key in (*self.cameras, STATE_KEY, "instruction")]
        return tuple(
            (value.tobytes(), value.shape, value.dtype.str)
            if isinstance(value, np.ndarray)
            else value
            for value in values
        )

    def action_origins(self, observations: Sequence[Observation]) -> np.ndarray | None:
        """Return the states, where an action is an offset from them; None if it never is."""
        if not self.state_offsets:
            return None
        origins = np.zeros((len(observations), self.action_dim), np.float32)
        states = np.stack([self._state(each) for each in observations])
        origins[:, : self.state_offsets] = states[:, : self.state_offsets]
        return origins

    def normalise_actions(self, actions: np.ndarray) -> np.ndarray:
        """Convert actions [B, H, D] in the environment's units to the network's, float32."""
        return self.settings.action.normalise(actions).astype(np.float32)

    def restore_actions(self, numbers: np.ndarray) -> np.ndarray:
        """Invert `normalise_actions`: from float32 [B, H, D] to the environment's units."""
        return self.settings.action.restore(numbers).astype(np.float32)

    def _prompt(self, instruction: str, state: np.ndarray) -> str:
        if self.prompt == "pi05":
            return format_pi05(instruction, state)
        return format_pi0(instruction, self.settings.project)

    def _state(self, observation: Observation) -> np.ndarray:
        state, width = observation.get(STATE_KEY), self.settings.state_dim
        if not isinstance(state, np.ndarray) or state.shape != (width,):
            raise ValueError(
                f"observation[{STATE_KEY!r}] is {describe_array(state)}, expected float32 [{width}]: the "
                f"statistics of the policy's folder have {width} numbers for a state."
            )
        return state

    def _images(
        self, observations: Sequence[Observation], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        shape = (len(observations), 3, self.image_size, self.image_size)
        columns = [
            torch.full(shape, BLACK, device=device)
            if key == NO_CAMERA
            else self._camera(observations, key, device)
            for key in self.cameras
        ]
        is_there = torch.tensor([key != NO_CAMERA for key in self.cameras])
        mask = is_there.expand(len(observations), -1).clone()
        return torch.stack(columns, dim=1), to_device(mask, device)

    def _camera(
        self, observations: Sequence[Observation], key: str, device: torch.device
    ) -> Tensor:
        frames = [require_frame(each, key, NAME_CAMERAS) for each in observations]
        if len({frame.shape for frame in frames}) > 1:
            return torch.cat([self._resize(frame[None], device) for frame in frames])
        return self._resize(np.stack(frames), device)

    def _resize(self, frames: np.ndarray, device: torch.device) -> Tensor:
        images = to_device(torch.from_numpy(frames), device).permute(0, 3, 1, 2)
        return resize_padded(images, self.image_size, self.settings.project, self.padding)


def make_processor(
    size: PiSize,
    settings: FolderSettings,
    tokenizer: PiTokenizer,
    cameras: Sequence[str] | None,
    state_in_prompt: bool | None = None,
    state_offsets: int | None = None,
) -> PiProcessor:
    """Return the conversions of a folder's policy.

    Args:
        size: of the network.
        settings: the folder's.
        tokenizer: of prompts.
        cameras: observation key of each of the folder's cameras; None: by their names.
        state_in_prompt: whether pi0.5 reads the state; None: it does.
        state_offsets: first numbers of an action that are offsets from the state; None: none.

    Raises: ConfigError as `choose_cameras`, if pi0 is to read its state in the prompt, or if there are fewer
    numbers than offsets.
    """
    if state_in_prompt and size.kind == "pi0":
        raise ConfigError(
            "state_in_prompt is True, but the policy is pi0, which has a token for the state; leave it "
            "unset"
        )
    least = min(settings.action_dim, settings.state_dim)
    if state_offsets is not None and state_offsets > least:
        raise ConfigError(
            f"state_offsets is {state_offsets}, expected at most {least}: an action has {settings.action_dim} "
            f"numbers and the state {settings.state_dim}"
        )
    return PiProcessor(
        "pi0" if state_in_prompt is False else size.kind,
        settings,
        choose_cameras(settings, cameras),
        tokenizer,
        size.vision.image_size,
        size.state_dim,
        state_offsets=state_offsets or 0,
    )
