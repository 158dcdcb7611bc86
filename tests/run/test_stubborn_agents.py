"""No agent keeps a run from saving, from ending, or from naming its fault."""

import subprocess
import sys
from pathlib import Path

import pytest
from toy_runs import SMALL

PROGRAM = Path(__file__).parents[1] / "support" / "stubborn_agents.py"


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("goes on", 130, "did not end within 5 s of being cancelled"),
        ("its task goes on", 130, "after they were cancelled, and are left: episode"),
        ("exits", 1, "AgentError: the agent raised SystemExit: 3 while running episode"),
    ],
)
def test_a_run_ends_with_its_checkpoint_whatever_its_agents_do(
    tmp_path: Path, how: str, status: int, said: str
) -> None:
    options = [*SMALL, "--run.updates", "3", "--run.root", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), how, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr.partition("because of")[0]
    assert list(tmp_path.glob("*/checkpoints/update-*"))
