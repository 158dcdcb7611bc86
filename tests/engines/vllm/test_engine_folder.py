"""Folders of engines are private, and gone after a kill -9 with the next engine."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.engines.vllm.launch import engine_folder
from vla_rl.errors import ConfigError

OWNER = """
import sys
from vla_rl.engines.vllm.launch import engine_folder
with engine_folder() as folder:
    (folder / "config.json").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Not pytest's own, whose path is long."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def test_a_folder_outlives_its_owner_only_until_the_next_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().decode().strip())
        with engine_folder() as ours:
            assert ours.stat().st_mode & 0o777 == 0o700
            assert set(temporary.iterdir()) == {ours, theirs}
        owner.kill()
        owner.wait()
        assert theirs.exists()
    with engine_folder():
        assert not theirs.exists()
    assert list(temporary.iterdir()) == []


def test_a_path_that_is_too_long_for_sockets_is_refused(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = temporary / ("x" * 60)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with (
        pytest.raises(ConfigError, match="expected at most 70; set TMPDIR to a shorter one"),
        engine_folder(),
    ):
        pass
    assert list(long.iterdir()) == []
