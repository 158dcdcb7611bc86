"""Where LIBERO's meshes, textures and scenes come from. Nothing is ever downloaded here.

In this order: the folder that was asked for, the folder in `VLA_RL_LIBERO_ASSETS`, the installed package's own, the
folder into which hf-libero downloads. hf-libero ships no assets and would fetch them in the middle of building an
environment; here that is a step of its own, and an error names it.
"""

import os
from pathlib import Path

from vla_rl.envs.libero.tasks import libero_root

ASSETS_VARIABLE = "VLA_RL_LIBERO_ASSETS"
_NEEDED = ("scenes", "textures")

HOW_TO_GET_ASSETS = (
    "Either set VLA_RL_LIBERO_ASSETS (or the env's `assets`) to LIBERO's libero/libero/assets folder, "
    "or let hf-libero download it: python -c 'from huggingface_hub import snapshot_download as get; "
    'get("lerobot/libero-assets", repo_type="dataset", local_dir="{cache}")\', '
    "or copy that folder to {package}."
)


def find_assets(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of LIBERO's assets.

    Args:
        folder: use this one; None to look in the environment variable, the package and hf-libero's cache.

    Raises: `FileNotFoundError` naming the folder, what it lacks and the ways to put it right.
    """
    asked = folder if folder is not None else os.environ.get(ASSETS_VARIABLE) or None
    package, cache = libero_root() / "assets", Path("~/.cache/libero/assets").expanduser()
    candidates = [Path(asked)] if asked is not None else [package, cache]
    for candidate in candidates:
        if all((candidate / name).is_dir() for name in _NEEDED):
            return candidate.resolve()
    looked = " and ".join(f"{candidate} ({_what_is_wrong(candidate)})" for candidate in candidates)
    raise FileNotFoundError(f"LIBERO's assets were not found in {looked}. {how_to_get_assets()}")


def missing_asset(assets: Path, detail: str) -> FileNotFoundError:
    """The error for a folder that lacks a file which a task needs; `detail` names the file."""
    return FileNotFoundError(f"the LIBERO assets in {assets} are not complete: {detail}. {how_to_get_assets()}")


def how_to_get_assets() -> str:
    """The ways to get LIBERO's assets on this machine."""
    cache = Path("~/.cache/libero/assets").expanduser()
    return HOW_TO_GET_ASSETS.format(cache=cache, package=libero_root() / "assets")


def _what_is_wrong(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return "no " + " or ".join(f"{name}/" for name in _NEEDED if not (folder / name).is_dir()) + " in it"
