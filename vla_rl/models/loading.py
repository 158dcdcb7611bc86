"""Load any policy, as its checkpoint says.

Shared by all recipes that load a checkpoint. Importing this module does not import torch, so that a
recipe can show its help at once.
"""

import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import msgspec

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models import openvla_oft
from vla_rl.models.families import PolicyFamily, find_family, require_token_means
from vla_rl.models.prismatic.config import NewPart
from vla_rl.models.prismatic.conventions import (
    AS_STORED,
    FLOW_OPTIONS,
    STEERED_OPTIONS,
    CheckpointFormat as CheckpointFormat,
    Family as Family,
    refuse_unused,
)
from vla_rl.models.prismatic.public_config import EXTENSION_FILE
from vla_rl.models.steered.file import (
    MODEL_TYPE,
    explain_missing_base,
    read_steered_file,
    require_base_source,
)
from vla_rl.types import PositiveFloat, Sampling

if TYPE_CHECKING:
    import torch

    from vla_rl.models.openvla import OpenVla
    from vla_rl.models.prismatic.folder import PublicFolder
    from vla_rl.models.robot_policy import RobotPolicy

    VlaPolicy: TypeAlias = OpenVla | openvla_oft.OpenVlaOft | openvla_oft.ContinuousOpenVlaOft


Device: TypeAlias = Literal["auto", "cpu", "cuda"]
"""auto: the first GPU, or the CPU if there is none."""

NEWER_OPTIONS: Final = (*FLOW_OPTIONS, *STEERED_OPTIONS)
"""Fields of `CheckpointFormat` that other families than OpenVLA's brought."""

WHOLE_FILE_BYTES = 64 << 20
"""Files up to this size are hashed whole in a checkpoint's digest; larger ones by size, beginning
and end."""


class CheckpointConfig(CheckpointFormat, frozen=True, kw_only=True):
    """How to interpret a checkpoint, and the device that computes it."""

    device: Device = "auto"
    """Device of the policy; auto takes the first GPU, or the CPU if there is none."""

    def list_files(self, checkpoint: str) -> tuple[Path, ...]:
        """Return all files of a checkpoint of any family, its adapter's included.

        Raises: CheckpointError.
        """
        return list_files(checkpoint, self)

    def open_checkpoint(self, checkpoint: "Path | str | PublicFolder") -> "PublicFolder":
        """Read a checkpoint of OpenVLA's families with its adapter, without the weights.

        Raises: CheckpointError.
        """
        from vla_rl.models.prismatic.folder import open_folder

        return open_folder(checkpoint, self.adapter)


class DecodingConfig(CheckpointConfig, frozen=True, kw_only=True):
    """A checkpoint, and how its actions are chosen outside of training."""

    temperature: PositiveFloat | None = None
    """Sample actions at this temperature. None: take the most likely action. With by_mean, the temperature of the
    distributions whose means are taken; None: 1."""

    by_mean: bool = False
    """Take, for each number of an action, the token nearest to the mean of the policy's distribution, instead of
    the likeliest. For policies with action tokens that are chosen at once (OpenVLA-OFT); others refuse it."""

    seed: int = 0
    """Seed of sampled actions."""

    @property
    def sampling(self) -> Sampling:
        """How actions are chosen."""
        return Sampling(
            greedy=self.temperature is None or self.by_mean,
            by_mean=self.by_mean,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=self.seed,
        )

    @property
    def decoding_in_words(self) -> str:
        """How actions are chosen, for a plan and the caption of a table."""
        sampling = self.sampling
        if not sampling.greedy:
            return f"sampled at temperature {sampling.temperature:g}"
        if not sampling.by_mean:
            return "greedy"
        return f"greedy, by the means of tokens at temperature {sampling.temperature:g}"

    def load_decoder(self, checkpoint: str) -> "RobotPolicy":
        """Load the policy in a folder or hub id.

        Raises: as `load_policy`; ConfigError for `by_mean` if its tokens have no means.
        """
        policy = load_policy(checkpoint, self, self.device)
        self.require_means(policy)
        return policy

    def require_means(self, policy: object) -> None:
        """Raise ConfigError for `by_mean` if the tokens of a policy have no means."""
        if self.by_mean:
            require_token_means(policy, "by_mean")


def read_family(checkpoint: "str | PublicFolder") -> Family:
    """Return the family that a checkpoint names. Raises: ConfigError if it names none;
    CheckpointError if it is not a checkpoint.
    """

    from vla_rl.models.prismatic.folder import open_folder

    folder = open_folder(checkpoint)
    if folder.extension.family == "openvla":
        return "openvla"
    if folder.extension.family == "openvla_oft":
        return "openvla_oft" if folder.extension.head == "tokens" else "continuous"
    if find_action_head(checkpoint) is not None:
        return "continuous"
    raise ConfigError(
        f"{folder.path} does not say which policy it is (no family in {EXTENSION_FILE}, no action "
        "head beside it); set "
        "policy_family (--policy-family) to openvla, openvla_oft or continuous"
    )


def find_action_head(checkpoint: "str | PublicFolder") -> Path | None:
    """Return the action head's file beside a public checkpoint, if any. Raises: CheckpointError."""

    from vla_rl.models.prismatic.folder import open_folder
    from vla_rl.models.tensor_reading import find_part

    return find_part(open_folder(checkpoint).folders, "action_head")


def load_policy(
    checkpoint: "str | PublicFolder",
    config: CheckpointFormat,
    device: Device,
) -> "RobotPolicy":
    """Load the policy in `checkpoint` onto `device`; its family follows from its tensors.

    Args:
        checkpoint: a folder, read already or not, or a hub id.
        config: settings that the checkpoint's files leave out.
        device: device of the policy.

    Raises: ConfigError if the device does not exist, or for a setting that the family does not read;
    CheckpointError naming what is missing, unknown or damaged.
    """
    family = _find_family(checkpoint)
    if family is None:
        return load_openvla(checkpoint, config, device)
    folder = _locate(checkpoint)
    return family.load_policy(folder, config, choose_device(device))


def _find_family(checkpoint: "str | Path | PublicFolder") -> PolicyFamily | None:
    """Return the family of a checkpoint, None for OpenVLA's."""
    # Only a folder of OpenVLA's is ever read already.
    return find_family(_locate(checkpoint)) if isinstance(checkpoint, str | Path) else None


def _locate(checkpoint: "str | Path | PublicFolder") -> Path:
    from vla_rl.models.prismatic.folder import PublicFolder
    from vla_rl.models.tensor_reading import locate

    return checkpoint.path if isinstance(checkpoint, PublicFolder) else locate(checkpoint)


def load_openvla(
    checkpoint: "str | PublicFolder",
    config: CheckpointFormat,
    device: Device,
    new_parts: Collection[NewPart] = (),
    seed: int = 0,
) -> "VlaPolicy":
    """Load a policy of OpenVLA's three families, for recipes that know their configuration.

    Args:
        checkpoint: a folder, read already or not, or a hub id.
        config: settings that the checkpoint's files leave out.
        device: device of the policy.
        new_parts: parts that the checkpoint lacks and that fine-tuning is to add.
        seed: seed of the new parts' weights.

    Raises: ConfigError if the device does not exist, the family is another one, wrong or has to be
    given; CheckpointError naming what is missing, unknown or damaged.
    """
    require_openvla(checkpoint)
    # torch, timm and transformers take seconds to import
    from vla_rl.models.openvla import OpenVla
    from vla_rl.models.prismatic.folder import open_folder

    checkpoint = open_folder(checkpoint, config.adapter)
    refuse_unused("openvla", **{name: getattr(config, name) for name in NEWER_OPTIONS})
    family = read_family(checkpoint) if config.policy_family == "auto" else config.policy_family
    # A checkpoint that is loaded as another family acts, but solves nothing, so what the files
    # show is held against the option.
    if family != "continuous" and (head := find_action_head(checkpoint)) is not None:
        raise ConfigError(
            f"policy_family is {family!r}, but {head.parent} has an action head, {head.name}; set "
            "it to continuous"
        )
    chosen = choose_device(device)
    if family == "openvla":
        refuse_unused(family, new_parts=new_parts or None)
        return OpenVla.load(checkpoint, config, device=chosen)
    if family == "openvla_oft":
        return openvla_oft.OpenVlaOft.load(
            checkpoint, config, new_parts=new_parts, seed=seed, device=chosen
        )
    return openvla_oft.ContinuousOpenVlaOft.load(
        checkpoint, config, new_parts=new_parts, seed=seed, device=chosen
    )


def require_openvla(checkpoint: "str | Path | PublicFolder") -> None:
    """Raise ConfigError for a policy of another family than OpenVLA's, before its files are read as theirs."""
    other = _find_family(checkpoint)
    if other is not None:
        advice = f"; {other.fine_tuned_by} fine-tunes it" if other.fine_tuned_by else ""
        raise ConfigError(
            f"{checkpoint} is a policy of the family {other.name}, expected OpenVLA or OpenVLA-OFT here{advice}"
        )


def choose_device(asked: Device) -> "torch.device":
    """Return the device that `asked` means.

    Raises: ConfigError if a GPU is requested and there is none.
    """
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device is 'cuda', but torch sees no GPU; expected 'cpu' or 'auto' on this machine"
        )
    return torch.device("cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu")


def list_files(checkpoint: str, format: CheckpointFormat = AS_STORED) -> tuple[Path, ...]:
    """Return all files of a checkpoint of any family, those of its adapter or of its frozen base included.

    Raises: CheckpointError.
    """
    from vla_rl.models.prismatic.folder import open_folder

    family = _find_family(checkpoint)
    if family is None:
        return open_folder(checkpoint, format.adapter).all_files
    folder = _locate(checkpoint)
    # in folders below it too, where openpi keeps the statistics
    own = tuple(sorted(path for path in folder.rglob("*") if path.is_file()))
    if MODEL_TYPE not in family.config_types:
        return own
    source = require_base_source(folder, read_steered_file(folder), format.base_policy)
    try:
        return own + list_files(source.path, source.format)
    except CheckpointError as error:
        raise explain_missing_base(folder, source, error) from error


def count_weight_bytes(files: Iterable[Path]) -> int:
    """Return the size of the weight files among these, in bytes."""
    return sum(
        file.stat().st_size for file in files if file.suffix in (".safetensors", ".pt", ".bin")
    )


def compute_digest(files: Iterable[Path]) -> str:
    """Return a fingerprint of a checkpoint, given all its files.

    It changes with the weights or settings.
    """
    digest = hashlib.blake2b(digest_size=16)
    # Large files are hashed by size, beginning and end, so that a checkpoint of 15 GB does not
    # delay every start.
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(WHOLE_FILE_BYTES))
            if size > WHOLE_FILE_BYTES:
                file.seek(-min(WHOLE_FILE_BYTES, size - WHOLE_FILE_BYTES), 2)
                digest.update(file.read())
    return digest.hexdigest()


def compute_digest_as_read(folder: str, format: CheckpointFormat) -> str:
    """Return a fingerprint of a checkpoint and of how it is read."""
    # under the names of the first version, so that runs of any version can be compared
    former = {now: before for before, now in CheckpointFormat.FORMER_NAMES.items()}
    settings = msgspec.json.encode(
        {
            former.get(name, name): getattr(format, name)
            for name in CheckpointFormat.__struct_fields__
            # options that are newer than a run leave its fingerprint as it was, unless they are set
            if name not in NEWER_OPTIONS or getattr(format, name) is not None
        }
    )
    digest = compute_digest(list_files(folder, format))
    return hashlib.blake2b(digest.encode() + settings, digest_size=16).hexdigest()


def require_new_folder(*folders: Path) -> None:
    """Check that a checkpoint can be saved to the folder.

    Raises: ConfigError if the folder exists already.
    """
    for folder in folders:
        if folder.exists():
            raise ConfigError(
                f"{folder} exists already, expected a new folder for the checkpoint; choose "
                "another --out"
            )
