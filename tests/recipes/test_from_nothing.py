"""docs/data.md's three commands, in small: a policy is taught from demonstrations in LIBERO and
judged there.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SMALLER = {
    "record_demonstrations": ["--num", "1", "--physics", "fast"],
    "sft_libero": ["--updates", "3", "--batch", "4"],
    "eval_libero": ["--init-states", "40", "--step-limit", "16", "--physics", "fast"],
}


def commands() -> list[list[str]]:
    """The arguments of each recipe in the page's block of three commands."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (chain,) = [
        block for block in blocks if "record_demonstrations" in block and "eval_libero" in block
    ]
    return [shlex.split(line)[2:] for line in chain.replace("\\\n", " ").splitlines()]


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_demonstrations_are_recorded_taught_and_judged_in_libero(tmp_path: Path) -> None:
    assert [words[0] for words in commands()] == [f"vla_rl.recipes.{name}" for name in SMALLER]
    for module, *words in commands():
        smaller = SMALLER[module.rpartition(".")[2]]
        for option in smaller[::2]:
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
        ran = subprocess.run(
            [sys.executable, "-m", module, *words, *smaller],
            cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    (results,) = tmp_path.glob("runs/eval-*/results.json")
    assert json.loads(results.read_text())["summary"]["episodes"] == 1
