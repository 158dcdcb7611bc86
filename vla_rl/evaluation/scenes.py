"""Conditions of a benchmark's environments besides task and start, and the images that a policy expects.

Recipes have options of these names and words; each makes a scene of them, and everything behind
takes that. The defaults for LIBERO differ on purpose: results are compared under exact physics and
the images that a policy was trained with, and training is paid by the control step (docs/libero.md).
One line warns if a policy that ships, or that was trained here, sees other images.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, Self, TypeAlias

import msgspec

from vla_rl.envs import LIBERO_SUITES
from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, Assets, find_assets
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.shipped import (
    BASE_POLICY,
    PLACEHOLDER_BASE_POLICY,
    SHIPPED,
    is_base_policy,
    resolve_name,
)
from vla_rl.types import Config, EnvSpec, PositiveInt
from vla_rl.util.foreign_data import reading

if TYPE_CHECKING:
    from vla_rl.models.prismatic.config import TrainingImages


Quality: TypeAlias = Literal["exact", "fast"]

# Each option of the conditions is declared here once. Recipes give it a default of their own, and
# the string below it in the recipe says what is particular to that default.
ImageSize: TypeAlias = Annotated[
    int, msgspec.Meta(ge=1, description="Side of the camera images in pixels.")
]
StepLimit: TypeAlias = Annotated[
    int, msgspec.Meta(ge=1, description="Control steps after which an episode is a failure.")
]
LiberoQuality: TypeAlias = Annotated[
    Quality,
    msgspec.Meta(
        description="Rendering quality. exact renders what published policies saw; fast renders "
        "without smoothing and with a plain robot, at a fraction of the cost."
    ),
]
MetaworldQuality: TypeAlias = Annotated[
    Quality,
    msgspec.Meta(
        description="Rendering quality. exact: the pixels of Meta-World's own renderer, 124 ms for "
        "one of 224 pixels on a CPU; fast: no shadows, rougher edges and a plainer robot. Choose "
        "the quality of the policy's demonstrations."
    ),
]
Physics: TypeAlias = Annotated[
    Literal["exact", "fast"],
    msgspec.Meta(
        description="exact gives robosuite's results bit for bit; fast is quicker and equals them "
        "up to rounding."
    ),
]
LiberoAssets: TypeAlias = Annotated[
    str | None,
    msgspec.Meta(
        description="Folder of LIBERO's assets, or `stand-ins` for the placeholder assets. None: "
        "the folder in VLA_RL_LIBERO_ASSETS; if that is not set, LIBERO's own, or placeholder "
        "assets if those are not installed."
    ),
]
Scenes: TypeAlias = Annotated[
    Literal["same", "published"],
    msgspec.Meta(
        description="Positions of fixtures. published: trial k of a task, from initial state k, "
        "uses LIBERO's k-th reset after one seeding, as OpenVLA, OpenVLA-OFT and openpi do. same: "
        "every trial uses the first reset, as SimpleVLA-RL does."
    ),
]

BASE_POLICY_IMAGES: Final = 84
PUBLISHED_IMAGES: Final = 256
WATCHED_IMAGES: Final = 224
"""Side in pixels of the images that published policies were trained with; `BASE_POLICY_IMAGES` is
that of the shipped ones, and `WATCHED_IMAGES` that of episodes without a policy."""

BASE_POLICY_QUALITY: Final[Quality] = "fast"
PUBLISHED_QUALITY: Final[Quality] = "exact"


class Scene(Config, frozen=True, kw_only=True):
    """Conditions that every benchmark's environments have."""

    image_size: ImageSize

    step_limit: StepLimit | None = None
    """None: each suite's published limit."""

    quality: Quality

    @property
    def in_words(self) -> str:
        """The conditions that a plan names."""
        return f"quality {self.quality}"

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Arguments of the environment, besides its task."""
        raise NotImplementedError

    def make_env_spec(self, suite: str, task_id: int) -> EnvSpec:
        """Return the specification of one task's environment."""
        return EnvSpec(id=f"vla_rl/{suite}-v0", kwargs={"task_id": task_id, **self.kwargs})


class MetaworldScene(Scene, frozen=True, kw_only=True):
    """Conditions of Meta-World's environments; see `MetaWorldEnv`."""

    quality: MetaworldQuality

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Arguments of `MetaWorldEnv`, besides the task."""
        return {
            "image_size": self.image_size,
            "step_limit": self.step_limit,
            "quality": self.quality,
        }


class LiberoOptions(Protocol):
    """Options of LIBERO's conditions that each of its recipes has."""

    @property
    def image_size(self) -> int | None: ...
    @property
    def quality(self) -> Quality | None: ...
    @property
    def assets(self) -> str | None: ...
    @property
    def physics(self) -> Literal["exact", "fast"]: ...


class LiberoScene(Scene, frozen=True, kw_only=True):
    """Conditions of LIBERO's environments; see `LiberoEnv`."""

    quality: LiberoQuality
    physics: Physics
    assets: LiberoAssets = None
    scenes: Scenes = "same"

    @classmethod
    def from_options(
        cls,
        options: LiberoOptions,
        checkpoint: str | None = None,
        step_limit: int | None = None,
        scenes: Scenes = "same",
    ) -> Self:
        """Return the conditions that a recipe's options name.

        An image size or a quality of None is what the policy of `checkpoint` was trained with, if that is known:
        it ships, it was trained here, or it sees images of one size alone.
        """
        image_size, quality = PUBLISHED_IMAGES, PUBLISHED_QUALITY
        if checkpoint is None:
            image_size = WATCHED_IMAGES
        elif (trained := _known_training_images(checkpoint)) is not None:
            image_size, quality = trained.image_size, trained.quality
        else:
            image_size = _read_fixed_image_size(checkpoint) or image_size
        return cls(
            image_size=options.image_size or image_size,
            quality=options.quality or quality,
            assets=options.assets,
            physics=options.physics,
            step_limit=step_limit,
            scenes=scenes,
        )

    @property
    def in_words(self) -> str:
        """The conditions that a plan names."""
        return f"physics {self.physics}, {super().in_words}"

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Arguments of `LiberoEnv`, besides the task and the scene seed."""
        # `same` stays out: records of episodes that are older than the option lack it
        scenes = {} if self.scenes == "same" else {"scenes": self.scenes}
        return {
            "image_size": self.image_size,
            "step_limit": self.step_limit,
            "assets": self.assets,
            "physics": self.physics,
            "quality": self.quality,
            **scenes,
        }

    def make_env_spec(self, suite: str, task_id: int, scene_seed: int | None = None) -> EnvSpec:
        """Return the specification of one task's environment; scene seed None is the default, 0.

        LIBERO's own suites have ids; those of other packages share `vla_rl/libero-v0`.
        """
        seed = {} if scene_seed is None else {"scene_seed": scene_seed}
        kwargs = {"task_id": task_id, **self.kwargs, **seed}
        if suite in LIBERO_SUITES:
            return EnvSpec(id=f"vla_rl/{suite}-v0", kwargs=kwargs)
        return EnvSpec(id="vla_rl/libero-v0", kwargs={"suite": suite, **kwargs})


def resolve_checkpoint(checkpoint: str, assets: str | None) -> str:
    """Return the folder or hub id that `checkpoint` names.

    Args:
        checkpoint: a folder, a hub id, or `shipped`: the base policy of this package that was
            trained on the assets in use; `shipped_flow`: its flow policy; `shipped_goal`: its policy for the ten tasks
            of libero_goal.
        assets: the assets in use, as `find_assets` takes them.

    Raises: ConfigError if there are no assets.
    """
    shipped = BASE_POLICY
    # the policy that was trained on the other assets does worse on these, and nothing would say why
    if checkpoint == SHIPPED and assets_in_use(assets).source == PLACEHOLDER_ASSETS:
        shipped = PLACEHOLDER_BASE_POLICY
    return resolve_name(checkpoint, shipped)


def assets_in_use(assets: str | None) -> Assets:
    """Return what `find_assets` finds. Raises: ConfigError if that is nothing, or only a part."""
    try:
        return find_assets(assets)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def note_training_images(policy: Any, scene: Scene) -> None:
    """Write down in a policy's configuration the images that it is trained on: its checkpoints name them, and
    later commands choose the same.

    Families without such a setting, which are neither OpenVLA's nor flow policies, stay as they are.
    """
    if not hasattr(policy.config, "training_images"):
        return
    from vla_rl.models.prismatic.config import TrainingImages

    kind = None
    if isinstance(scene, LiberoScene):
        # a drawing of the graph is made without LIBERO
        with contextlib.suppress(FileNotFoundError):
            is_placeholder = find_assets(scene.assets).source == PLACEHOLDER_ASSETS
            kind = PLACEHOLDER_ASSETS if is_placeholder else "own"
    images = TrainingImages(image_size=scene.image_size, quality=scene.quality, assets=kind)
    is_struct = isinstance(policy.config, msgspec.Struct)
    replaced: Any = msgspec.structs.replace if is_struct else dataclasses.replace
    policy.config = replaced(policy.config, training_images=images)


def describe_other_images(
    checkpoint: str, source: str, image_size: int, quality: Quality
) -> str | None:
    """Return one line if a policy will see other images than it was trained on, else None.

    It is None for a checkpoint that does not say what it was trained on, as public ones do not.

    Args:
        checkpoint: folder of the policy, or a hub id.
        source: source of the assets in use (`Assets.source`); empty for a benchmark without.
        image_size: side of the images, in pixels.
        quality: quality of the images.

    Raises: CheckpointError if the folder's settings cannot be read.
    """
    images_trained_on = _training_images(checkpoint)
    if images_trained_on is None:
        return None
    # a line and no refusal: evaluating on other images is an experiment that people make
    differences = []
    is_placeholder = images_trained_on.assets == PLACEHOLDER_ASSETS
    if images_trained_on.assets and source and is_placeholder != (source == PLACEHOLDER_ASSETS):
        trained_on = "placeholder assets" if is_placeholder else "LIBERO's own assets"
        hint = f" (`{SHIPPED}` names the one that was)" if is_base_policy(checkpoint) else ""
        differences.append(f"on {trained_on}, not on {source}{hint}")
    if quality != images_trained_on.quality:
        differences.append(f"in the quality {images_trained_on.quality}, not {quality}")
    if image_size != images_trained_on.image_size:
        differences.append(f"at {images_trained_on.image_size} pixels, not {image_size}")
    if not differences:
        return None
    return f"{checkpoint} was trained {'; '.join(differences)}: it does worse on these images"


def _read_fixed_image_size(checkpoint: str) -> int | None:
    """Return the pixels along each side of the images that a small flow policy must see; None for other
    policies, and for folders whose settings cannot be read, which loading them reports.
    """
    try:
        held = (Path(os.path.expanduser(checkpoint)) / "config.json").read_bytes()
        return msgspec.json.decode(held, type=_FlowFile).policy.image_size
    except (OSError, ValueError):
        return None


class _FlowPolicySize(msgspec.Struct):
    image_size: PositiveInt


class _FlowFile(msgspec.Struct):
    """The part of `config.json` that is read here, because `models/flow/small_folder.py` imports torch."""

    model_type: Literal["vla_rl_flow"]
    policy: _FlowPolicySize


def _known_training_images(checkpoint: str) -> "TrainingImages | None":
    """Return the images of a policy's training; None also for settings that cannot be read, which loading reports."""
    try:
        return _training_images(checkpoint)
    except (CheckpointError, OSError, ValueError):  # the latter for a name that no file can have
        return None


def _training_images(checkpoint: str) -> "TrainingImages | None":
    # the layouts of checkpoints come with it, which a plan of evaluations does without
    from vla_rl.models.families import read_config_type
    from vla_rl.models.prismatic.config import IMAGES_FILE, TrainingImages
    from vla_rl.models.prismatic.public_config import read_extension
    from vla_rl.models.steered.file import MODEL_TYPE, read_steered_file

    folder = Path(os.path.expanduser(checkpoint))
    if read_config_type(folder) == MODEL_TYPE:  # a head reads what its base makes of the images
        base = read_steered_file(folder).base
        if base is None:
            return None
        checkpoint, folder = base.path, Path(os.path.expanduser(base.path))
    if (folder / IMAGES_FILE).is_file():
        path = folder / IMAGES_FILE
        with reading(path, "sizes and quality of images", "copy it again", error=CheckpointError):
            return msgspec.json.decode(path.read_bytes(), type=TrainingImages)
    if not is_base_policy(checkpoint):
        return read_extension(folder).training_images
    is_placeholder = folder.resolve() == PLACEHOLDER_BASE_POLICY.resolve()
    return TrainingImages(
        image_size=BASE_POLICY_IMAGES,
        quality=BASE_POLICY_QUALITY,
        assets=PLACEHOLDER_ASSETS if is_placeholder else "own",
    )
