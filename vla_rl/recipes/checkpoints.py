"""Which policy a checkpoint holds, where it computes, and what it is made of: shared by recipes that load any of them."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

import vla_rl
from vla_rl.errors import ConfigError
from vla_rl.models import openvla, openvla_oft  # the policies themselves bring much more, when they are asked for
from vla_rl.models.openvla_oft.config import Dialect
from vla_rl.models.prismatic.config import Normalization
from vla_rl.models.prismatic.folder import open_folder
from vla_rl.models.prismatic.public_config import EXTENSION_FILE
from vla_rl.types import Config

if TYPE_CHECKING:
    VlaPolicy: TypeAlias = openvla.OpenVla | openvla_oft.OpenVlaOft | openvla_oft.ContinuousOpenVlaOft

BASE_POLICY: Final = Path(vla_rl.__file__).parent / "assets" / "libero_base"
"""The checkpoint that ships: it half learnt tasks 1, 6 and 8 of libero_object and task 7 of libero_goal."""

Family: TypeAlias = Literal["openvla", "openvla_oft", "continuous"]

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
"""auto: the first GPU, or the CPU where there is none."""

WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size count whole in a checkpoint's digest; larger ones by size, beginning and end."""


class CheckpointFormat(Config, frozen=True, kw_only=True):
    """How a checkpoint is to be understood."""

    policy_family: Literal["auto", "openvla", "openvla_oft", "continuous"] = "auto"
    """openvla: one action token after the other; openvla_oft: a chunk of tokens at once; continuous: OpenVLA-OFT with an L1
    or diffusion head. auto asks the checkpoint, which knows if it was saved here or has an action head beside it."""

    norm_key: str | None = None
    """Which of the checkpoint's action statistics, such as libero_goal; none where it has one set only."""

    normalization: Normalization = "bounds_q99"
    """bounds_q99: the 1st and 99th percentile of the statistics; bounds: the least and greatest value (ALOHA)."""

    dialect: Dialect = "openvla_oft"
    """Whose conventions an OpenVLA-OFT checkpoint was trained with; one that was saved here knows its own."""

    head: Literal["l1", "diffusion"] = "l1"
    """Head of a continuous checkpoint; one that was saved here knows its own."""

    cameras: tuple[str, ...] | None = None
    """Observation keys of its images; none for what checkpoints of its family use."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the weights; auto takes the files'."""


class CheckpointConfig(CheckpointFormat, frozen=True, kw_only=True):
    """How a checkpoint is to be understood, and where it computes."""

    device: Device = "auto"
    """Where the policy computes; auto takes the first GPU, or the CPU where there is none."""


def family_of(checkpoint: str) -> Family:
    """What a checkpoint says it is. Raises: ConfigError where it does not say; CheckpointError where it is none."""
    folder = open_folder(checkpoint)
    if folder.extension.family == "openvla":
        return "openvla"
    if folder.extension.family == "openvla_oft":
        return "openvla_oft" if folder.extension.head == "tokens" else "continuous"
    if action_head_of(checkpoint) is not None:
        return "continuous"
    raise ConfigError(
        f"{checkpoint} does not say which policy it is (no family in {EXTENSION_FILE}, no action head beside it); say "
        "policy_family: openvla, openvla_oft or continuous"
    )


def action_head_of(checkpoint: str) -> Path | None:
    """The file of the action head that stands beside a public checkpoint, if any. Raises: CheckpointError."""
    return next(iter(sorted(open_folder(checkpoint).path.glob("action_head*checkpoint*"))), None)


def load_policy(checkpoint: str, config: CheckpointFormat, device: Device) -> "VlaPolicy":
    """The policy in `checkpoint`, a folder or a hub id, on `device`.

    Raises: ConfigError for a device that is not there, or a family that has to be said, or is another; CheckpointError
    saying what is missing, unknown or damaged.
    """
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    family = family_of(checkpoint) if config.policy_family == "auto" else config.policy_family
    if family != "continuous" and (head := action_head_of(checkpoint)) is not None:
        raise ConfigError(
            f"policy_family is {family!r}, but {checkpoint} has an action head, {head.name}; say continuous"
        )
    where, key, scale = device_for(device), config.norm_key, config.normalization
    if family == "openvla":
        return openvla.OpenVla.load(checkpoint, norm_key=key, normalization=scale, dtype=dtype, device=where)
    if family == "openvla_oft":
        return openvla_oft.OpenVlaOft.load(
            checkpoint,
            norm_key=key,
            normalization=scale,
            dialect=config.dialect,
            cameras=config.cameras,
            dtype=dtype,
            device=where,
        )
    return openvla_oft.ContinuousOpenVlaOft.load(
        checkpoint,
        head="diffusion" if (open_folder(checkpoint).extension.head or config.head) == "diffusion" else "l1",
        norm_key=key,
        normalization=scale,
        dialect=config.dialect,
        cameras=config.cameras or ("image", "wrist_image"),
        dtype=dtype,
        device=where,
    )


def device_for(asked: Device) -> torch.device:
    """The device that is meant. Raises: ConfigError where a GPU is asked for and there is none."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no GPU; expected 'cpu' or 'auto' on this machine")
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def weight_bytes(checkpoint: str) -> int:
    """Size of the weight files. Raises: CheckpointError."""
    path = open_folder(checkpoint).path
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".safetensors", ".pt"))


def digest_of(checkpoint: str) -> str:
    """A fingerprint of every file of a checkpoint: another one means other weights or settings. Raises: CheckpointError."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(file for file in open_folder(checkpoint).path.iterdir() if file.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(WHOLE_FILE_BYTES))
            if size > WHOLE_FILE_BYTES:
                file.seek(-min(WHOLE_FILE_BYTES, size - WHOLE_FILE_BYTES), 2)
                digest.update(file.read())
    return digest.hexdigest()


def require_new(*folders: Path) -> None:
    """What is going to be saved has a place. Raises: ConfigError for a folder that exists already."""
    for folder in folders:
        if folder.exists():
            raise ConfigError(
                f"{folder} exists already, expected a new folder for the checkpoint; choose another --out"
            )
