"""`python -m scripts.placeholder_assets OUT`: write the placeholder assets into a folder."""

import argparse
from pathlib import Path

from scripts.placeholder_assets.files import write_placeholder_assets


def main() -> None:
    """Write the files and print their number and size."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.placeholder_assets", description=__doc__
    )
    parser.add_argument(
        "out", type=Path, help="folder to write to; files that are there are overwritten"
    )
    folder = write_placeholder_assets(parser.parse_args().out)
    files = [path for path in folder.rglob("*") if path.is_file()]
    print(
        f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1000:.0f} kB in "
        f"{folder}"
    )


if __name__ == "__main__":
    main()
