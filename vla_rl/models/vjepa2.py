"""V-JEPA 2 as SRPO's trajectory encoder: batches of a few videos take turns on the device lane.

    trajectories ─► host thread: 64 frames each, uint8 ─► device lane: resize, encoder, mean over tokens ─► [N, T, D]
    frames uint8 [n, H, W, 3] ─► 64 of them ─► short side to 438 ─► middle 384 x 384 ─► ImageNet's mean and std

The video's preprocessing equals transformers' `VJEPA2VideoProcessor` bit for bit on a CPU; frames
stay uint8 until they are on the device. A checkpoint as transformers writes it is checked first,
then only the video encoder is loaded, at the first call, in the host thread. The caller decides what
is embedded: the calling node streams over the groups that are trained on, so groups that the graph's
filter dropped and evaluation are not embedded. The configuration is
`vla_rl.algorithms.VJepa2Config`.
"""

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from huggingface_hub import constants, try_to_load_from_cache
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as vision
from transformers import PreTrainedConfig, VJEPA2Config, VJEPA2Model

from vla_rl.algorithms import VJepa2Config
from vla_rl.algorithms.srpo.encoders import cannot_embed, stack_embeddings, video_frames
from vla_rl.engines import DeviceLane
from vla_rl.engines.device_lane import to_device
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.tensor_reading import download, tensor_files
from vla_rl.models.weight_files import check_weights, refuse_extra_adapter, refuse_other_sources
from vla_rl.types import Trajectory
from vla_rl.util.arrays import require_finite, torch_dtype

MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)


def sample_frames(
    frames: Sequence[NDArray[np.uint8]], num_frames: int, short_videos: str
) -> NDArray[np.uint8]:
    """Sample `num_frames` of n frames, in the order of time.

        n >= num_frames            frame floor(j * (n - 1) / (num_frames - 1)) for each j
        n < num_frames, cyclic     0, 1, .., n - 1, 0, 1, ..
        n < num_frames, stretched  the first line, so that frames repeat in place

    Args:
        frames: uint8 [H, W, 3] each, n >= 1, all of one size.
        num_frames: number of frames to return, >= 2.
        short_videos: `cyclic` or `stretched`.

    Returns: uint8 [num_frames, H, W, 3]. Raises: ValueError if there is no frame.
    """
    if not len(frames):
        raise ValueError("the video has no frame, expected at least one.")
    if len(frames) < num_frames and short_videos == "cyclic":
        chosen = np.resize(np.arange(len(frames)), num_frames)
    else:
        chosen = np.linspace(0, len(frames) - 1, num_frames).astype(np.int64)
    return np.stack([frames[int(index)] for index in chosen])


def preprocess(frames: Tensor, image_size: int) -> Tensor:
    """Resize, crop and normalise one video, on its device.

    Args:
        frames: uint8 [n, H, W, 3].
        image_size: side of the result; the short side of the frame is resized to int(image_size *
            256 / 224) before.

    Returns: float32 [n, 3, image_size, image_size].
    """
    images = frames.permute(0, 3, 1, 2)
    height, width = images.shape[-2:]
    short = int(image_size * 256 / 224)
    size = (
        [short, int(short * width / height)]
        if height <= width
        else [int(short * height / width), short]
    )
    images = vision.resize(images, size, vision.InterpolationMode.BILINEAR, antialias=True)
    top, left = ((side - image_size) // 2 for side in size)
    images = images[..., top : top + image_size, left : left + image_size].float()
    mean, std = (
        to_device(torch.tensor(numbers).view(3, 1, 1) * 255.0, images.device)
        for numbers in (MEAN, STD)
    )
    pixels: Tensor = (images - mean) / std
    return pixels


WEIGHT_FILES: Final = ("model.safetensors", "model.safetensors.index.json")


def check_folder(folder: str) -> None:
    """Check that a folder is a V-JEPA 2 checkpoint, before its weights are loaded; for a hub name,
    its config is read.

    Raises: ConfigError naming what was found instead.
    """
    looks_local = folder.startswith(("/", ".", "~")) or folder.count("/") != 1
    if not Path(folder).is_dir() and looks_local:
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, and there is no such folder; expected one with "
            "config.json and model.safetensors, or a name on the hub such as "
            "'facebook/vjepa2-vitg-fpc64-384'."
        )
    _read_config(folder)
    _require_weights(folder)
    if Path(folder).is_dir():
        try:
            refuse_extra_adapter(Path(folder))
            refuse_other_sources(Path(folder), tensor_files(Path(folder)))
        except CheckpointError as error:
            raise ConfigError(f"V-JEPA 2 in {folder!r} cannot be used: {error}") from error


def load_encoder(config: VJepa2Config) -> nn.Module:
    """Load the encoder on the CPU, in the configured precision, for videos of the configured size;
    the predictor is left out.

    Raises: ConfigError if the folder is not a V-JEPA 2 checkpoint, lacks weights, or cannot be
    fetched.
    """
    model_config = _read_config(config.folder)
    patch_size = model_config.patch_size
    if not isinstance(patch_size, int) or config.image_size % patch_size:
        raise ConfigError(
            f"VJepa2Config.image_size is {config.image_size}, expected a multiple of the patches "
            f"of {config.folder}, {patch_size} pixels."
        )
    # positions are rotary and computed from these two, so any size fits the weights
    model_config.crop_size, model_config.frames_per_clip = config.image_size, config.num_frames
    try:
        is_local = Path(config.folder).is_dir()
        folder = Path(config.folder) if is_local else download(config.folder, without=("*.pt",))
        check_weights(folder)
        loaded: Any = VJEPA2Model.from_pretrained(
            folder,
            config=model_config,
            dtype=torch_dtype(config.precision),
            use_safetensors=True,
            output_loading_info=True,
        )
        require_finite(loaded[0].encoder.state_dict(), folder)
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:
        raise ConfigError(f"V-JEPA 2 in {config.folder!r} cannot be loaded: {error}") from error
    model, report = loaded
    # transformers leaves missing tensors at random values and says so only in its report.
    missing = sorted(name for name in report["missing_keys"] if "encoder." in name)
    if missing:
        raise ConfigError(
            f"V-JEPA 2 in {config.folder!r} lacks {len(missing)} tensors of its encoder, the "
            f"first is {missing[0]!r}."
        )
    encoder: nn.Module = model.encoder
    return encoder.eval().requires_grad_(False)


def _require_weights(folder: str) -> None:
    """Raise ConfigError unless the weights are in a local folder, in the hub's cache, or can be
    downloaded.
    """
    if Path(folder).is_dir():
        found = any((Path(folder) / name).is_file() for name in WEIGHT_FILES)
    else:
        found = any(isinstance(try_to_load_from_cache(folder, name), str) for name in WEIGHT_FILES)
        if not found and not constants.HF_HUB_OFFLINE:
            return  # downloaded when the first trajectory is embedded
    if not found:
        raise ConfigError(
            f"V-JEPA 2 in {folder!r} has none of {', '.join(WEIGHT_FILES)}; expected the weights "
            "beside config.json, in safetensors."
        )


def _read_config(folder: str) -> VJEPA2Config:
    try:
        found, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, whose config.json cannot be read: {error}"
        ) from error
    if not found:
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, which holds no config.json; expected a V-JEPA 2 "
            "checkpoint."
        )
    if found.get("model_type") != "vjepa2":
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, which holds a model of type "
            f"{found.get('model_type')!r}, expected 'vjepa2'."
        )
    return VJEPA2Config.from_dict(found)


class VJepa2Encoder:
    """A `TrajectoryEncoder` (Assran et al. 2025, arXiv:2506.09985): mean over the tokens of the
    last layer, after its norm.

    Args:
        config: checkpoint, size, precision, and number of videos in a batch.
        image_key: observation key of the video.
        lane: the device lane, shared with the policy and the learner.
        device: device of the encoder.

    Raises: ConfigError for a local folder that is not a V-JEPA 2 checkpoint.
    """

    def __init__(
        self, config: VJepa2Config, image_key: str, lane: DeviceLane, device: torch.device
    ) -> None:
        check_folder(config.folder)
        self._config, self._image_key = config, image_key
        self._lane, self._device = lane, device
        self._encoder: nn.Module | None = None

    async def embed(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Embed trajectories, float32 [N, num_moments, D].

        Raises: ConfigError if the checkpoint cannot be loaded.
        """
        if not trajectories:
            return np.empty((0, 0, 0), np.float32)
        size = self._config.videos_per_batch
        batches = [
            trajectories[start : start + size] for start in range(0, len(trajectories), size)
        ]
        rows: list[NDArray[np.float32]] = []
        try:
            async with aclosing(self._lane.prepare_ahead(self._videos, batches)) as prepared:
                async for _, videos in prepared:
                    rows.extend(await self._lane.run(self._embed, videos, work="embed"))
        finally:
            if self._config.offload and self._encoder is not None:
                await self._lane.run(self._move, torch.device("cpu"), work="embed")
        return stack_embeddings(trajectories, rows)

    def _videos(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Sample the videos, uint8 [num_frames, H, W, 3] each, and load the weights.

        Runs in the host thread.
        """
        # Loaded at the first trajectory: a dry run, or a run that ends before it, does without
        # them.
        if self._encoder is None:
            self._encoder = load_encoder(self._config)
        return [torch.from_numpy(self._video(trajectory)) for trajectory in trajectories]

    def _video(self, trajectory: Trajectory) -> NDArray[np.uint8]:
        frames = video_frames(trajectory, self._image_key)
        try:
            return sample_frames(frames, self._config.num_frames, self._config.short_videos)
        except ValueError as error:
            raise cannot_embed(trajectory, str(error)) from error

    @torch.inference_mode()
    def _embed(self, videos: list[Tensor]) -> list[NDArray[np.float32]]:
        """Embed videos, float32 [num_moments, D] each."""
        encoder = self._move(self._device)
        pixels = torch.stack(
            [
                preprocess(to_device(video, self._device), self._config.image_size)
                for video in videos
            ]
        )
        # [B, tokens, D], tokens in the order of time: all patches of one tubelet after those of the
        # one before
        tokens = encoder(pixel_values_videos=pixels).last_hidden_state
        moments = tokens.float().unflatten(1, (self._config.num_moments, -1)).mean(dim=2)
        return list(moments.cpu().numpy())

    def _move(self, device: torch.device) -> nn.Module:
        assert self._encoder is not None
        return self._encoder.to(device)
