"""`python -m vla_rl.cli.report RUN`: write the report of a finished or running training run
again.
"""

import argparse
import sys
from pathlib import Path

from vla_rl.cli.report import write_report
from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.reporting import RunDirectory
from vla_rl.run.terminal import lasting_output


@lasting_output()
def main() -> int:
    """Write the report and print its path.

    Return the exit status: 1, with one line, if it cannot be written.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the folder of a training run")
    folder: Path = parser.parse_args().run
    try:
        run = RunDirectory.existing(folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print(write_report(run))
    except (VlaRlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
