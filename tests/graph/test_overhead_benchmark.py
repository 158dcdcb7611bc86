"""The benchmark of the executor runs and ends with its JSON line.

Its figures are not judged here.
"""

import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_ends_with_its_figures() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.graph_overhead",
        "--rounds",
        "1",
        "--updates",
        "20",
    ]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=100, check=True
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {"overhead_us_per_node", "overlap_vs_longest", "overlap_vs_sum"} <= figures.keys()
