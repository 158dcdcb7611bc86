"""The table of policy families: by which tensors a folder is recognised, and who loads it.

    folder ─► names of its tensors ─► PolicyFamily ─► load(folder, format, device) ─► RobotPolicy

What a folder is follows from its tensors. Its `config.json` may say something else, because tools copy that
file from a base or leave it as it was; then the tensors decide, and one line says so.

To add a family, add an entry to `FAMILIES`: a function of the names that is true for its folders alone, and a
function that loads one. Importing this module does not import torch.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

import msgspec

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.prismatic.conventions import AS_STORED, CheckpointFormat

if TYPE_CHECKING:
    import torch

    from vla_rl.models.robot_policy import RobotPolicy

_log = logging.getLogger(__name__)

CONFIG_FILE: Final = "config.json"


@dataclass(frozen=True)
class PolicyFamily:
    """A family of policies whose folders are recognised by their tensors.

    Example:
        PolicyFamily("mlp", has_tensors("body.0.weight", "head.weight"), "my_family:load")
    """

    name: str
    """Name in messages, such as pi05."""

    has_its_tensors: Callable[[Collection[str]], bool]
    """Whether the names of a folder's tensors are those of this family."""

    load: str
    """`module:function`, called with the folder, a `CheckpointFormat` and a torch device."""

    reads: frozenset[str] = field(default_factory=frozenset)
    """Fields of `CheckpointFormat` that `load` uses; others must not be set."""

    config_types: frozenset[str] = field(default_factory=frozenset)
    """Values of `type` or `model_type` in `config.json` that mean this family."""

    fine_tuned_by: str | None = None
    """Recipe that fine-tunes its folders on demonstrations, such as sft_flow; None: none does."""

    def load_policy(
        self, folder: Path, format: CheckpointFormat, device: "torch.device"
    ) -> "RobotPolicy":
        """Load a folder of this family.

        Raises: ConfigError for a setting that it does not read; CheckpointError.
        """
        for name in format.__struct_fields__:
            value = getattr(format, name)
            # Subclasses of the format have options of recipes, which are no matter of a folder.
            known = hasattr(AS_STORED, name)
            if known and name not in self.reads and value != getattr(AS_STORED, name):
                raise ConfigError(
                    f"{name} is {value!r}, but the tensors of {folder} are those of {self.name}, which "
                    "does not read it; leave it out"
                )
        policy: RobotPolicy = resolve_name(self.load)(folder, format, device)
        return policy


def has_tensors(*marks: str, without: Sequence[str] = ()) -> Callable[[Collection[str]], bool]:
    """Return a function that finds all marks, and none of `without`, among the names of tensors.

    A mark is a name, or its end behind a dot: folders of some tools put a prefix before every name.
    """

    def found(mark: str, names: Collection[str]) -> bool:
        return any(name == mark or name.endswith(f".{mark}") for name in names)

    def has_its_tensors(names: Collection[str]) -> bool:
        return all(found(mark, names) for mark in marks) and not any(
            found(mark, names) for mark in without
        )

    return has_its_tensors


def has_adapters(names: Collection[str]) -> bool:
    """Return whether adapters of a flow policy are among the names of tensors."""
    return any(name.startswith("lora/") for name in names)


PI_EXPERT: Final = "paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight"
SMOLVLA_EXPERT: Final = "vlm_with_expert.lm_expert.layers.0.self_attn.q_proj.weight"
"""Tensors of experts for actions, by which their families are known whatever prefix their names have."""

CHAIN_OPTIONS: Final = frozenset({"flow_steps", "noise_level", "flow_guidance"})
SMOLVLA_OPTIONS: Final = CHAIN_OPTIONS | {"cameras", "chunk_size", "dtype"}
PI_OPTIONS: Final = SMOLVLA_OPTIONS | {"norm_key", "state_in_prompt", "state_offsets"}

FAMILIES: Final[tuple[PolicyFamily, ...]] = (
    PolicyFamily(
        "mlp",
        has_tensors("body.0.weight", "body.0.bias", "head.weight", "head.bias"),
        "vla_rl.models.mlp:load_mlp",
    ),
    # before the families of the weights that it holds besides
    PolicyFamily(
        "adapted_flow",
        has_adapters,
        "vla_rl.models.flow.adapted_folder:load_adapted_flow",
        reads=PI_OPTIONS,
        config_types=frozenset({"vla_rl_flow", "pi0", "pi05", "smolvla"}),
        fine_tuned_by="sft_flow",
    ),
    PolicyFamily(
        "small_flow",
        has_tensors(
            "stem.0.weight", "word_hashes", "expert_norm.dense.weight", "action_out.weight"
        ),
        "vla_rl.models.flow.small_folder:load_small_family",
        reads=CHAIN_OPTIONS,
        config_types=frozenset({"vla_rl_flow"}),
        fine_tuned_by="sft_flow",
    ),
    PolicyFamily(
        "pi0",
        has_tensors(PI_EXPERT, without=("time_mlp_in.weight",)),
        "vla_rl.models.flow.loading:load_pi_policy",
        reads=PI_OPTIONS,
        config_types=frozenset({"pi0"}),
        fine_tuned_by="sft_flow",
    ),
    PolicyFamily(
        "pi05",
        has_tensors(PI_EXPERT, "time_mlp_in.weight"),
        "vla_rl.models.flow.loading:load_pi_policy",
        reads=PI_OPTIONS,
        config_types=frozenset({"pi05"}),
        fine_tuned_by="sft_flow",
    ),
    PolicyFamily(
        "smolvla",
        has_tensors(SMOLVLA_EXPERT),
        "vla_rl.models.flow.loading:load_smolvla_policy",
        reads=SMOLVLA_OPTIONS,
        config_types=frozenset({"smolvla"}),
        fine_tuned_by="sft_flow",
    ),
    PolicyFamily(
        "steered",
        has_tensors("steering_head.is_on", "steering_head.mean.weight"),
        "vla_rl.models.steered.folder:load_steered_family",
        reads=frozenset({"base_policy"}),
        config_types=frozenset({"vla_rl_steered"}),
    ),
)
"""Every family beside OpenVLA's, which `vla_rl.models.loading` reads with their own settings."""


def find_family(folder: Path) -> PolicyFamily | None:
    """Return the family of a folder; None for OpenVLA's, and for a folder without weights.

    Warns if `config.json` names another one, once for each file of weights.

    Raises: CheckpointError for an index that names missing shards, a damaged header, or a folder of another
    project whose weights no family reads.
    """
    from vla_rl.models.tensor_reading import holds_weights, tensor_files

    if not holds_weights(folder):
        _refuse_jax_checkpoint(folder)
        return None
    files = tensor_files(folder)
    family = next((each for each in FAMILIES if each.has_its_tensors(files.keys())), None)
    if family is None:
        _refuse_other_layout(folder, files.keys())
        return None
    named = read_config_type(folder)
    others = {kind for each in FAMILIES if each is not family for kind in each.config_types}
    # a command looks at a folder several times, and fine-tuning at a copy that links to its weights
    weights = (folder / min(files.values())).resolve()
    if named in others - family.config_types and weights not in _reported:
        _reported.add(weights)
        _log.warning(
            "%s of %s says %s, but its tensors are those of %s: it is read as %s",
            CONFIG_FILE, folder, named, family.name, family.name,
        )  # fmt: skip
    return family


_reported: Final[set[Path]] = set()
"""Weights whose folder was reported to say that they are another family's."""


def _refuse_jax_checkpoint(folder: Path) -> None:
    """Raise CheckpointError for what openpi's training writes."""
    if (folder / "params" / "_METADATA").is_file():
        raise CheckpointError(
            f"{folder} is openpi's JAX checkpoint, which is not read here; convert it with openpi's "
            "examples/convert_jax_model_to_pytorch.py, and copy its assets beside the weights."
        )


def _refuse_other_layout(folder: Path, names: Collection[str]) -> None:
    """Raise CheckpointError if `config.json` is a known policy's, or its project's, whose tensors no family has."""
    from vla_rl.models.tensor_reading import list_some

    fields, named = _read_config(folder), read_config_type(folder)
    known = {kind for each in FAMILIES for kind in each.config_types}
    is_lerobots, is_openpis = "input_features" in fields, "action_horizon" in fields
    if not (named in known or is_lerobots or is_openpis):
        return
    said = f"says {named}" if named else f"is {'openpi' if is_openpis else 'LeRobot'}'s"
    raise CheckpointError(
        f"{folder / CONFIG_FILE} {said}, but no policy is known by its tensors ({list_some(sorted(names))}): "
        "they are another model's, or named by another project. Take a folder that openpi's PyTorch code or "
        "LeRobot saved of pi0, pi0.5 or SmolVLA; folders of transformers hold no statistics."
    )


def read_config_type(folder: Path) -> str | None:
    """Return `type` (LeRobot's) or `model_type` (transformers') of `config.json`; None without one.

    Raises: CheckpointError if the file is no JSON.
    """
    fields = _read_config(folder)
    named = fields.get("type", fields.get("model_type"))
    return named if isinstance(named, str) else None


def _read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of `config.json`; none without one. Raises: CheckpointError if it is no JSON."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error


def has_token_means(policy: Any) -> bool:
    """Return whether `Sampling.by_mean` says anything for a policy: it chooses all numbers at once, as tokens."""
    return bool(getattr(policy, "has_token_means", False))


def require_token_means(policy: Any, option: str, flag: str | None = None) -> None:
    """Raise ConfigError if `Sampling.by_mean`, which an option sets, says nothing for a policy.

    `flag` says on the command line that it is not wanted; None: --no- and the option's name.
    """
    if not has_token_means(policy):
        table, dot, name = option.replace("_", "-").rpartition(".")
        raise ConfigError(
            f"{option} is True, but a {type(policy).__name__} does not choose all numbers of its actions at "
            "once, as tokens, so there are no means to act by; expected False "
            f"({flag or f'--{table}{dot}no-{name}'}), or a policy such as OpenVLA-OFT with tokens"
        )


def require_method(policy: Any, name: str, option: str) -> Any:
    """Return a method that not every family has. Raises: ConfigError naming the option that needs it."""
    method = getattr(policy, name, None)
    if method is None:
        raise ConfigError(
            f"{option} is set, but a {type(policy).__name__} has no method `{name}`; leave it unset, or take "
            "a policy of a family that has it"
        )
    return method
