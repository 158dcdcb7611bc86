"""Checks of the lines that a GPU runs, without one.

    python -m benchmarks.gpu --tiny

Each module of `FIGURES` has a function `figures`, and explains its keys of the last line.
"""

import argparse
from typing import Final

from benchmarks.gpu import meta_paths, syncs
from benchmarks.interleaved import print_json_line

FIGURES: Final = (meta_paths, syncs)
"""Modules with the figures of the last line, in their order."""


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tiny",
        action="store_true",
        required=True,
        help="small random networks on torch's meta device, which needs no GPU",
    )
    parser.parse_args()
    figures: dict[str, float] = {}
    for module in FIGURES:
        figures |= module.figures()
    print_json_line(figures)


if __name__ == "__main__":
    main()
