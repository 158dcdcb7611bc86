"""The LIBERO policies that ship: which of them acts, and the warning if it sees other images than
it was trained on.
"""

from pathlib import Path

from vla_rl.envs.libero.assets import STAND_INS, Assets, find_assets
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import BASE_POLICY_IMAGES, BASE_POLICY_QUALITY, Quality
from vla_rl.models.loading import (
    BASE_POLICY,
    SHIPPED,
    STAND_INS_BASE_POLICY,
    is_base_policy,
)


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
    """Return one line if a shipped policy will see other images than it was trained on, else None.

    Args:
        checkpoint: folder of the policy.
        source: source of the assets in use (`Assets.source`).
        image_size: side of the images, in pixels.
        quality: quality of the images.
    """
    if not is_base_policy(checkpoint):
        return None
    is_of_stand_ins = Path(checkpoint).expanduser().resolve() == STAND_INS_BASE_POLICY.resolve()
    differences = []
    if is_of_stand_ins != (source == STAND_INS):
        trained_on = "stand-ins" if is_of_stand_ins else "LIBERO's own assets"
        differences.append(f"on {trained_on}, not on {source} (`{SHIPPED}` names the one that was)")
    if quality != BASE_POLICY_QUALITY:
        differences.append(f"in the quality {BASE_POLICY_QUALITY}, not {quality}")
    if image_size != BASE_POLICY_IMAGES:
        differences.append(f"at {BASE_POLICY_IMAGES} pixels, not {image_size}")
    if not differences:
        return None
    return f"{checkpoint} was trained {'; '.join(differences)}: it does worse on these images"
