"""`docs/environments.md` is run as it stands: each Python block is a file by the name in its first
line.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL))
EXPECTED = {
    "play_here.py": "success: True",
    "play_there.py": "[0. 0. 0. 0. 0. 0. 0. 0.] False {",
    "play_pool.py": "'simulation/leases': 6.0",
    "play_packed.py": "8 episodes in 2 processes",
    "train_elsewhere.py": "(2, 4) [1. 1.]",
    "wrapped.py": "(9.8, 9.8) (4,)",
    "play_mine.py": "True after ",
}


def test_every_block_of_the_page_is_known_here() -> None:
    assert DOCUMENT.read_text().count("```python") == len(BLOCKS)
    assert set(BLOCKS) == {*EXPECTED, "my_envs.py"}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_block_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    for file_name, code in BLOCKS.items():
        (tmp_path / file_name).write_text(code)
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
