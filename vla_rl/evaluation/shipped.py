"""The LIBERO policies that ship: which of them acts; and the warning if one of them, or a policy
that was trained here, sees other images than it was trained on.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from vla_rl.envs.libero.assets import STAND_INS, Assets, find_assets
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import BASE_POLICY_IMAGES, BASE_POLICY_QUALITY, Quality
from vla_rl.models.loading import (
    BASE_POLICY,
    SHIPPED,
    STAND_INS_BASE_POLICY,
    is_base_policy,
)

if TYPE_CHECKING:
    from vla_rl.models.prismatic.config import TrainingImages


def resolve_checkpoint(checkpoint: str, assets: str | None) -> str:
    """Return the folder or hub id that `checkpoint` names.

    Args:
        checkpoint: a folder, a hub id, or `shipped`: the base policy of this package that was
            trained on the assets in use.
        assets: the assets in use, as `find_assets` takes them.

    Raises: ConfigError if there are no assets.
    """
    if checkpoint != SHIPPED:
        return checkpoint
    source = assets_in_use(assets).source
    return str(STAND_INS_BASE_POLICY if source == STAND_INS else BASE_POLICY)


def assets_in_use(assets: str | None) -> Assets:
    """Return what `find_assets` finds. Raises: ConfigError if that is nothing, or only a part."""
    try:
        return find_assets(assets)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def other_pictures(checkpoint: str, source: str, image_size: int, quality: Quality) -> str | None:
    """Return one line if a policy will see other images than it was trained on, else None.

    It is None for a checkpoint that does not say what it was trained on, as public ones do not.

    Args:
        checkpoint: folder of the policy, or a hub id.
        source: source of the assets in use (`Assets.source`); empty for a benchmark without.
        image_size: side of the images, in pixels.
        quality: quality of the images.

    Raises: CheckpointError if the folder's settings cannot be read.
    """
    taught = _taught_pictures(checkpoint)
    if taught is None:
        return None
    differences = []
    is_of_stand_ins = taught.assets == STAND_INS
    if taught.assets and source and is_of_stand_ins != (source == STAND_INS):
        trained_on = "stand-ins" if is_of_stand_ins else "LIBERO's own assets"
        hint = f" (`{SHIPPED}` names the one that was)" if is_base_policy(checkpoint) else ""
        differences.append(f"on {trained_on}, not on {source}{hint}")
    if quality != taught.quality:
        differences.append(f"in the quality {taught.quality}, not {quality}")
    if image_size != taught.image_size:
        differences.append(f"at {taught.image_size} pixels, not {image_size}")
    if not differences:
        return None
    return f"{checkpoint} was trained {'; '.join(differences)}: it does worse on these images"


def _taught_pictures(checkpoint: str) -> "TrainingImages | None":
    # the layouts of checkpoints come with it, which a plan of evaluations does without
    from vla_rl.models.prismatic.config import TrainingImages
    from vla_rl.models.prismatic.public_config import read_extension

    folder = Path(checkpoint).expanduser()
    if not is_base_policy(checkpoint):
        return read_extension(folder).pictures
    is_of_stand_ins = folder.resolve() == STAND_INS_BASE_POLICY.resolve()
    return TrainingImages(
        image_size=BASE_POLICY_IMAGES,
        quality=BASE_POLICY_QUALITY,
        assets=STAND_INS if is_of_stand_ins else "own",
    )
