"""`python -m vla_rl.envs.libero.download_assets`: fetch LIBERO's own assets (some 1.5 GB) to where hf-libero keeps them.

A step of its own, because hf-libero would do it in the middle of building an environment, and a hub is not always there.
"""

import argparse
import sys
from pathlib import Path

from vla_rl.envs.libero.assets import cache_folder

REPOSITORY = "lerobot/libero-assets"


def main() -> int:
    """Download, and say where to."""
    parser = argparse.ArgumentParser(prog="python -m vla_rl.envs.libero.download_assets", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=cache_folder(), help="where to; %(default)s")
    folder = parser.parse_args().folder
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(REPOSITORY, repo_type="dataset", local_dir=folder)
    except OSError as error:  # what the hub's client raises without a network, and what a disk raises
        print(f"{REPOSITORY} could not be downloaded to {folder}: {error}", file=sys.stderr)
        return 1
    print(f"LIBERO's assets are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
