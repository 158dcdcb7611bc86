"""How a checkpoint in the public layout is interpreted, where its files do not say.

Systems with OpenVLA's architecture differ in conventions: a checkpoint works only with those of its
training, and its files do not name them. Recipes hand one `CheckpointFormat` to `load_policy`, which
hands it to the policy's family; each setting is declared, explained and given its default here
alone.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias

import msgspec

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.images import ImagePipelineName
from vla_rl.models.prismatic.config import AdapterUse, Normalization, Vocabulary
from vla_rl.types import Config, NonNegativeFloat, NonNegativeInt, PositiveInt
from vla_rl.util.arrays import torch_dtype

if TYPE_CHECKING:
    import torch


ConventionName: TypeAlias = Literal[
    "openvla_oft", "simplevla", "simplevla_robotwin", "rlinf", "rlinf_official", "rlinf_robotwin"
]
"""Project, and simulator if that matters, whose conventions a checkpoint was trained with."""


class Conventions(NamedTuple):
    """Settings that the checkpoints of one project share.

    A family without a stop token, or without a choice of vocabulary, ignores that setting.
    """

    images: ImagePipelineName
    has_stop_token: bool
    rope_inv_freq_dtype: Literal["float32", "bfloat16"]
    vocabulary: Vocabulary
    epsilon: float
    """Number that OpenVLA's decoding adds to the range of the statistics; OpenVLA-OFT's adds 1e-8
    in every convention."""


CONVENTIONS: Final[Mapping[ConventionName, Conventions]] = {
    "openvla_oft": Conventions("exact", True, "float32", "all", 0.0),
    "simplevla": Conventions("exact", True, "float32", "all", 0.0),
    "simplevla_robotwin": Conventions("crop", True, "float32", "all", 0.0),
    "rlinf": Conventions("bicubic_float", False, "bfloat16", "actions", 1e-8),
    "rlinf_official": Conventions("bicubic_pillow", True, "bfloat16", "actions", 1e-8),
    "rlinf_robotwin": Conventions("crop", True, "bfloat16", "actions", 1e-8),
}
"""Conventions by project. `openvla_oft` is the authors' evaluation in LIBERO. SimpleVLA-RL,
siiRL and SRPO (`simplevla`) agree with it there; in RoboTwin they only crop the simulator's frame,
and so does RLinf with its version `official`.
"""


def resolve_conventions(
    folder: Path,
    known: Conventions | None,
    asked: ConventionName | None,
    *,
    without: Collection[str],
) -> Conventions:
    """Return the conventions that a checkpoint was saved with here, else those of a convention, else
    OpenVLA's own.

    Args:
        folder: the checkpoint.
        known: its own conventions, if it was saved here.
        asked: name of the requested convention, or None.
        without: fields that a policy of this family does not have; they are not compared.

    Raises: ConfigError for an unknown convention; CheckpointError if the checkpoint was saved with
    other conventions than those requested.
    """
    # Checked here too: from code any text may come, and from the command line only a known one.
    if asked is not None and asked not in CONVENTIONS:
        raise ConfigError(f"convention is {asked!r}, expected one of {', '.join(CONVENTIONS)}")
    wanted = CONVENTIONS[asked or "openvla_oft"]
    if known is None:
        return wanted
    known = known._replace(**{field: getattr(wanted, field) for field in without})
    if asked is not None and known != wanted:
        raise CheckpointError(
            f"{folder} was saved with {known}, which differs from the convention {asked!r}; leave the "
            "convention out, because the checkpoint stores its own."
        )
    return known


Family: TypeAlias = Literal["openvla", "openvla_oft", "continuous"]


Guidance: TypeAlias = Annotated[float, msgspec.Meta(ge=1)]
"""Weight of the label by which a flow policy acts, as classifier-free guidance has it."""


class CheckpointFormat(Config, frozen=True, kw_only=True):
    """How to interpret a checkpoint.

    Example:
        CheckpointFormat(norm_key="libero_goal", convention="simplevla")
        CheckpointFormat(policy_family="continuous", normalization="bounds", chunk_size=25)  # ALOHA
    """

    FORMER_NAMES = MappingProxyType({"dialect": "convention"})

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

    convention: ConventionName | None = None
    """Project whose conventions the checkpoint was trained with: images, stop token, positions,
    vocabulary. none: the checkpoint's own, else those of OpenVLA's authors.
    """

    vocabulary: Vocabulary | None = None
    """Token ids over which OpenVLA normalises an action token's probability, in rollout and
    training alike: all, or the action tokens only. none: the checkpoint's own, else the convention's.
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

    flow_steps: PositiveInt | None = None
    """Steps from noise to actions of a flow policy: 3 to 5 in training by reinforcement learning, 10 in
    public evaluations. none: the checkpoint's own."""

    noise_level: NonNegativeFloat | None = None
    """Noise of a flow policy's stochastic step, 0.3 to 0.5; 0 leaves decisions without a density, which
    a loss with a ratio needs. none: the checkpoint's own, else 0.5."""

    flow_guidance: Guidance | None = None
    """Guidance of a flow policy that learnt labels (`recap_flow`): 1 acts on "Advantage: positive", above 1
    goes further. none: the checkpoint's own."""

    state_in_prompt: bool | None = None
    """Whether pi0.5 reads the state in its prompt. False for openpi's `pi05_libero`, which was trained
    without (discrete_state_input=False). none: the checkpoint's own, else True."""

    state_offsets: NonNegativeInt | None = None
    """First numbers of an action that are offsets from the state, which is added to them: 6 for openpi's
    `pi0_libero` (extra_delta_transform=True). none: the checkpoint's own, else 0."""

    base_policy: str | None = None
    """Folder or hub id of the frozen base of a steered policy, if it is no longer where the head's folder says;
    its digest has to be the one that the head was trained over. shipped, shipped_flow, shipped_goal: this package's
    own. none: the folder that the head names."""

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """Data type to load as; None keeps the files'."""
        return None if self.dtype == "auto" else torch_dtype(self.dtype)

    def changed(self, **fields: Any) -> Self:
        """Return the format with other fields; `dtype` and `adapter` may be torch's and a path."""
        import torch

        # Configurations are written as JSON, which has no dtypes and no paths.
        if isinstance(fields.get("dtype"), torch.dtype):
            fields["dtype"] = str(fields["dtype"]).removeprefix("torch.")
        if fields.get("dtype", "") is None:
            fields["dtype"] = "auto"
        if isinstance(fields.get("adapter"), Path):
            fields["adapter"] = str(fields["adapter"])
        return msgspec.structs.replace(self, **fields)


FLOW_OPTIONS: Final = (
    "flow_steps",
    "noise_level",
    "flow_guidance",
    "state_in_prompt",
    "state_offsets",
)
"""Fields of `CheckpointFormat` that flow policies alone read."""

STEERED_OPTIONS: Final = ("base_policy",)
"""Fields that heads over a frozen base alone read."""

AS_STORED: Final = CheckpointFormat()
"""The format of a checkpoint whose files say everything."""


def refuse_unused(family: Family, **options: object) -> None:
    """Raise ConfigError if an option is set that a policy of this family does not have."""
    # An option that nothing reads would leave its user believing that it holds.
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}, which a policy of the family {family!r} does not have; "
                "leave it out"
            )
