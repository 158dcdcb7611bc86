"""Write the files that run in another program's Python: `vla-rl export carla carla_side`.

vla-rl export carla DIR      for the machine with CARLA: the agent, a server of routes
vla-rl export navsim DIR     for the machine with navsim: the exporter of its scenes

The folder can be copied to that machine as it is: nothing in it imports vla_rl.
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from vla_rl.run.terminal import lasting_output

ENVS: Final = Path(__file__).parents[1] / "envs"
EXPORTED: Final = {
    "carla": (ENVS / "bench2drive" / "carla_side", "vla_rl_*.py"),
    "navsim": (ENVS / "navsim", "export_scenes.py"),
}
"""Folder and names of the files for each other program."""


def list_exported(program: str) -> list[Path]:
    """Return the files for a program, by name."""
    folder, names = EXPORTED[program]
    return sorted(folder.glob(names))


@lasting_output()
def main() -> int:
    """Write the files and print their paths; return the exit status: 1 if one cannot be written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", choices=EXPORTED, help="the program whose Python runs the files")
    parser.add_argument("folder", type=Path, help="is made if it is missing")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in list_exported(arguments.program):
            written = folder / source.name
            # both sides have to speak one version of their protocol, so that an export after an
            # upgrade replaces the files of the one before
            written.write_bytes(source.read_bytes())
            print(written)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
