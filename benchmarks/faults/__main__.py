"""Command line of the fault campaign: `python -m benchmarks.faults --help`."""

import argparse
import sys
from pathlib import Path

import benchmarks.faults
from benchmarks.faults.campaign import Campaign, kinds_of_faults
from benchmarks.interleaved import print_json_line, print_table


def main() -> int:
    """Run a campaign; the exit status is 1 if any try failed."""
    kinds = sorted(kinds_of_faults(Path()))
    parser = argparse.ArgumentParser(
        description=benchmarks.faults.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="minutes after which no try is started; default 10",
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="most tries of each kind; default: no limit"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of all faults and their times; default 0"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=kinds, default=kinds, help="kinds of faults; default: all"
    )
    asked = parser.parse_args()
    campaign = Campaign(seed=asked.seed, kinds=asked.kinds)
    campaign.run(asked.minutes, asked.rounds)
    rows = {
        kind: f"{campaign.failures[kind]} of {campaign.tries[kind]} tries failed"
        for kind in asked.kinds
    }
    print_table(
        "Faults", {**rows, **{kind: f"skipped: {why}" for kind, why in campaign.skipped.items()}}
    )
    print_json_line(campaign.figures())
    return int(campaign.failures.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
