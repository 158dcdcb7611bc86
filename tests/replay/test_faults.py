"""No transition is lost or doubled by kills, full disks and damaged segments."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_transition_is_lost_or_doubled_and_batches_are_drawn_again_after_kills() -> None:
    command = ["benchmarks.off_policy", "--parts", "faults", "--kills", "20", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps"] > 5
    for name in (
        "transitions_lost",
        "transitions_doubled",
        "samples_unequal_after_resume",
        "damage_unnoticed",
    ):
        assert figures[name] == 0, figures
