"""Load any policy: its family, device and settings.

Shared by all recipes that load a checkpoint. Importing this module does not import torch, so that a
recipe can show its help at once.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import vla_rl
from vla_rl.errors import ConfigError
from vla_rl.models import openvla, openvla_oft
from vla_rl.models.openvla_oft.config import NewPart
from vla_rl.models.prismatic.config import AdapterUse, Normalization
from vla_rl.models.prismatic.dialects import Dialect, Vocabulary
from vla_rl.models.prismatic.public_config import EXTENSION_FILE
from vla_rl.types import Config

if TYPE_CHECKING:
    import torch

    from vla_rl.models.prismatic.folder import PublicFolder

    VlaPolicy: TypeAlias = (
        openvla.OpenVla | openvla_oft.OpenVlaOft | openvla_oft.ContinuousOpenVlaOft
    )

BASE_POLICY: Final = Path(vla_rl.__file__).parent / "assets" / "libero_base"
"""The checkpoint in this package: half-trained on tasks 1, 6 and 8 of libero_object and task 7 of
libero_goal."""

Family: TypeAlias = Literal["openvla", "openvla_oft", "continuous"]

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
"""auto: the first GPU, or the CPU if there is none."""

WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are hashed whole in a checkpoint's digest; larger ones by size, beginning
and end."""


class CheckpointFormat(Config, frozen=True, kw_only=True):
    """How to interpret a checkpoint."""

    policy_family: Literal["auto", "openvla", "openvla_oft", "continuous"] = "auto"
    """openvla: action tokens one after the other; openvla_oft: a chunk of tokens at once;
    continuous: OpenVLA-OFT with an L1 or diffusion head. auto (the default) reads it from the
    checkpoint, which works if vla_rl saved it or it has an action head.
    """

    norm_key: str | None = None
    """Key of the checkpoint's action statistics, such as libero_goal. Not needed if the checkpoint
    has only one set."""

    normalization: Normalization | None = None
    """bounds_q99: the 1st and 99th percentile of the statistics; bounds: the minimum and maximum
    (ALOHA). none: the checkpoint's own setting, else the percentiles.
    """

    dialect: Dialect | None = None
    """Project whose conventions the checkpoint was trained with: images, stop token, positions,
    vocabulary. none: the checkpoint's own, else those of OpenVLA's authors.
    """

    vocabulary: Vocabulary | None = None
    """Token ids over which OpenVLA normalises an action token's probability, in rollout and
    training alike: all, or the action tokens only. none: the checkpoint's own, else the dialect's.
    OpenVLA-OFT always uses the action tokens only.
    """

    head: Literal["l1", "diffusion"] | None = None
    """Head of a continuous checkpoint whose files do not name it. none: the checkpoint's own, else
    l1."""

    cameras: tuple[str, ...] | None = None
    """Observation keys of the images. none: the default of the checkpoint's family."""

    chunk_size: int | None = None
    """Control steps in a chunk, if an OpenVLA-OFT checkpoint does not name them (25 for ALOHA's).
    none: LIBERO's 8."""

    adapter: str | None = None
    """Folder or hub id of a peft adapter that was trained on the checkpoint; its head and
    projectors are loaded too, if it has any. Not needed if the checkpoint is itself an adapter: it
    names its base.
    """

    adapter_use: AdapterUse | None = None
    """merge (the default): add the adapter to the weights; train: keep the adapter and continue
    training it."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the weights; auto keeps the files'."""

    def opened(self, checkpoint: "str | PublicFolder") -> "PublicFolder":
        """Read the checkpoint with its adapter, without the weights. Raises: CheckpointError."""
        from vla_rl.models.prismatic.folder import open_folder

        return open_folder(checkpoint, self.adapter)


class CheckpointConfig(CheckpointFormat, frozen=True, kw_only=True):
    """How to interpret a checkpoint, and the device that computes it."""

    device: Device = "auto"
    """Device of the policy; auto takes the first GPU, or the CPU if there is none."""


def is_base_policy(checkpoint: str) -> bool:
    """Return whether a folder is the checkpoint of this package, however its path is written."""
    return Path(checkpoint).expanduser().resolve() == BASE_POLICY.resolve()


def family_of(checkpoint: "str | PublicFolder") -> Family:
    """Return the family that a checkpoint names. Raises: ConfigError if it names none;
    CheckpointError if it is not a checkpoint.
    """
    from vla_rl.models.prismatic.folder import open_folder

    folder = open_folder(checkpoint)
    if folder.extension.family == "openvla":
        return "openvla"
    if folder.extension.family == "openvla_oft":
        return "openvla_oft" if folder.extension.head == "tokens" else "continuous"
    if action_head_of(checkpoint) is not None:
        return "continuous"
    raise ConfigError(
        f"{folder.path} does not say which policy it is (no family in {EXTENSION_FILE}, no action "
        "head beside it); set "
        "policy_family (--policy-family) to openvla, openvla_oft or continuous"
    )


def action_head_of(checkpoint: "str | PublicFolder") -> Path | None:
    """Return the action head's file beside a public checkpoint, if any. Raises: CheckpointError."""
    from vla_rl.models.prismatic.folder import open_folder
    from vla_rl.models.prismatic.weights import find_part

    return find_part(open_folder(checkpoint).folders, "action_head")


def load_policy(
    checkpoint: "str | PublicFolder",
    config: CheckpointFormat,
    device: Device,
    new_parts: Collection[NewPart] = (),
    seed: int = 0,
) -> "VlaPolicy":
    """Load the policy in `checkpoint`, a folder (read already or not) or a hub id, onto `device`.

    Args:
        checkpoint: a folder, read already or not, or a hub id.
        config: settings that the checkpoint's files leave out.
        device: device of the policy.
        new_parts: parts that the checkpoint lacks and that fine-tuning is to add.
        seed: seed of the new parts' weights.

    Raises: ConfigError if the device does not exist, or the family is wrong or has to be given;
    CheckpointError naming what is missing, unknown or damaged.
    """
    import torch

    checkpoint = config.opened(checkpoint)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    family = family_of(checkpoint) if config.policy_family == "auto" else config.policy_family
    if family != "continuous" and (head := action_head_of(checkpoint)) is not None:
        raise ConfigError(
            f"policy_family is {family!r}, but {head.parent} has an action head, {head.name}; set "
            "it to continuous"
        )
    shared: dict[str, Any] = {
        "norm_key": config.norm_key,
        "normalization": config.normalization,
        "dialect": config.dialect,
        "adapter_use": config.adapter_use or "merge",
        "dtype": dtype,
        "device": device_for(device),
    }
    if family == "openvla":
        _refuse(family, chunk_size=config.chunk_size, head=config.head, new_parts=new_parts or None)
        if config.cameras is not None and len(config.cameras) != 1:
            raise ConfigError(
                f"cameras is {config.cameras!r}, expected one camera: OpenVLA was "
                "trained on one image"
            )
        camera = config.cameras[0] if config.cameras else None
        return openvla.OpenVla.load(
            checkpoint, vocabulary=config.vocabulary, camera=camera, **shared
        )
    _refuse(family, vocabulary=config.vocabulary)
    shared |= {
        "cameras": config.cameras,
        "chunk_size": config.chunk_size,
        "new_parts": new_parts,
        "seed": seed,
    }
    if family == "openvla_oft":
        _refuse(family, head=config.head)
        return openvla_oft.OpenVlaOft.load(checkpoint, **shared)
    return openvla_oft.ContinuousOpenVlaOft.load(checkpoint, head=config.head, **shared)


def _refuse(family: Family, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, which a policy of the family {family!r} does not have; "
                "leave it out"
            )


def described(policy: "VlaPolicy") -> str:
    """Describe in one line how a policy acts, as its checkpoint was interpreted."""
    config = policy.config
    kind = (
        "OpenVLA" if isinstance(policy, openvla.OpenVla) else f"OpenVLA-OFT, {policy.config.head}"
    )
    bounds, dtype = config.action_bounds, next(policy.network.parameters()).dtype
    proprio = getattr(config, "proprio", None)
    state = "" if proprio is None else f" and {proprio.key}"
    return (
        f"{kind}: sees {', '.join(config.cameras)}{state} ({config.images}), decides "
        f"{config.chunk_size} x "
        f"{config.action_dim} numbers by the statistics {config.norm_key!r} "
        f"({config.normalization}, gripper "
        f"{bounds.gripper}), {str(dtype).removeprefix('torch.')}"
    )


def device_for(asked: Device) -> "torch.device":
    """Return the device that `asked` means.

    Raises: ConfigError if a GPU is requested and there is none.
    """
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch sees no GPU; expected 'cpu' or 'auto' on this machine"
        )
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def weight_bytes(folder: "PublicFolder") -> int:
    """Return the size of the weight files in bytes."""
    return sum(
        file.stat().st_size
        for file in folder.all_files
        if file.suffix in (".safetensors", ".pt", ".bin")
    )


def digest_of(folder: "PublicFolder") -> str:
    """Return a fingerprint of all files of a checkpoint.

    It changes with the weights or settings.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in folder.all_files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(WHOLE_FILE_BYTES))
            if size > WHOLE_FILE_BYTES:
                file.seek(-min(WHOLE_FILE_BYTES, size - WHOLE_FILE_BYTES), 2)
                digest.update(file.read())
    return digest.hexdigest()


def require_new(*folders: Path) -> None:
    """Check that a checkpoint can be saved to the folder.

    Raises: ConfigError if the folder exists already.
    """
    for folder in folders:
        if folder.exists():
            raise ConfigError(
                f"{folder} exists already, expected a new folder for the checkpoint; choose "
                "another --out"
            )
