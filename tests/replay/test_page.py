"""The page about the replay buffer shows what runs, and options that exist."""

import re
import tempfile
from pathlib import Path

import pytest

from vla_rl.replay import ReplayConfig

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()


def test_the_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(source, "replay.md", "exec"), {})
    assert list(tmp_path.glob("*/segment-00000000.rows"))


def test_the_page_explains_every_option() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == set(
        ReplayConfig.__struct_fields__
    )
