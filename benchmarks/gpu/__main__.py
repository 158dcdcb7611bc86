"""Checks of the lines that a GPU runs, without one.

    python -m benchmarks.gpu --tiny

The keys of the last line are explained in `meta_paths`, `syncs` and `estimates`.
"""

import argparse

from benchmarks.gpu import meta_paths, syncs
from benchmarks.gpu.estimates import estimate_figures
from benchmarks.interleaved import print_json_line


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
    print_json_line(meta_paths.figures() | syncs.figures() | estimate_figures(is_tiny=True))


if __name__ == "__main__":
    main()
