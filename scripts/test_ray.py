"""Run the tests of hosts on Ray, in an environment of their own: `make test-ray`.

Ray is 70 MB and brings packages of its own, so it is not installed beside everything else. The
environment has Ray, and sees the packages of this interpreter.
"""

import argparse
import os
import secrets
import subprocess
import sys
from pathlib import Path

from layered_environment import layered_environment

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run the tests; return their exit status."""
    parser = argparse.ArgumentParser(description="Test hosts on Ray with a cluster of two nodes.")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".venv" / "ray", help="folder of the environment"
    )
    parser.add_argument("--ray", default="ray>=2.52", help="Ray to install, such as 'ray==2.60.*'")
    options, others = parser.parse_known_args()
    python = layered_environment(options.folder, options.ray)
    variables = {
        **os.environ,
        # ray reads them when it is imported
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # on a busy machine a node takes longer than the 30 s that ray allows
        "RAY_raylet_start_wait_time_s": "120",
        "PYTHONPATH": str(ROOT),
    }
    files = ("tests/cluster/test_ray_hosts.py", "tests/run/test_hosts.py")
    command = [str(python), "-m", "pytest", *files, *others]
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
