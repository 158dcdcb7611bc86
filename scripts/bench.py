"""Run every benchmark, beside the peers that some compare with: `make bench`.

Ray and Stable-Baselines3 are in an environment of their own, which sees the packages of this
interpreter: beside these, pip would replace versions that vLLM needs.
"""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from layered_environment import layered_environment

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = (
    "actor_calls",
    "env_transport",
    "process_start",
    "episode_scheduling",
    "graph_overhead",
    "libero_throughput",
    "srpo_reward",
    "policy_inference",
    "learner_step",
    "engines",
    "serving",
    "stable_baselines",
)


def main() -> int:
    """Run them one after the other; stop at the first that fails and return its status."""
    parser = argparse.ArgumentParser(description="Run every benchmark, or those that are named.")
    parser.add_argument("names", nargs="*", default=BENCHMARKS, help="such as actor_calls")
    names = parser.parse_args().names
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python = layered_environment(
        ROOT / ".venv" / "bench", *project["optional-dependencies"]["bench"]
    )
    for name in names:
        command = [str(python), "-m", f"benchmarks.{name}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
