"""Temporary folders of processes that may be killed: held while one of their owners lives, and
swept afterwards.
"""

import ast
import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vla_rl.actors import owned_folder
from vla_rl.actors.owned_folder import PREFIXES, OwnedFolder, remove_tree, sweep

PREFIX = "owned."
OWNER = """
import sys
from vla_rl.actors.owned_folder import OwnedFolder
print(OwnedFolder("owned.").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_swept_once_its_owner_was_killed_though_it_is_empty(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().decode().strip())
        sweep(PREFIX)
        assert folder.exists()
        owner.kill()
    sweep(PREFIX)
    assert not folder.exists()


def test_a_child_that_inherited_the_lock_holds_the_folder_too(temporary: Path) -> None:
    folder = OwnedFolder(PREFIX)
    with subprocess.Popen(["sleep", "1000"], pass_fds=(folder.descriptor,)) as child:
        os.close(folder.descriptor)
        sweep(PREFIX)
        assert folder.path.exists()
        child.kill()
    sweep(PREFIX)
    assert not folder.path.exists()


def test_folders_of_another_prefix_are_left_alone(temporary: Path) -> None:
    (temporary / "owners").mkdir()
    sweep(PREFIX)
    assert (temporary / "owners").exists()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, names = tempfile.mkdtemp, list[str]()

    def make_and_lose_the_first(**options: str) -> str:
        names.append(make(**options))
        if len(names) == 1:
            sweep(PREFIX)
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    folder = OwnedFolder(PREFIX)
    assert [str(path) for path in temporary.iterdir()] == [str(folder.path)] == names[1:]
    folder.remove()
    assert not list(temporary.iterdir())


def test_a_file_system_without_locks_does_for_a_folder_that_is_then_never_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, lock: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = OwnedFolder(PREFIX)
    assert (
        "cannot be locked ([Errno 9] Bad file descriptor), so it stays if this process is "
        "killed" in caplog.text
    )
    sweep(PREFIX)
    assert folder.path.exists()
    folder.remove()
    assert not folder.path.exists()


def test_folders_without_permissions_or_thousands_deep_are_removed_too(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "closed" / "inside").mkdir(parents=True)
    (folder / "closed").chmod(0)
    here = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=here)
        here, above = os.open("deep", os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
    remove_tree(folder)
    assert not folder.exists()


def test_every_folder_that_a_kill_leaves_is_swept_by_the_next_run() -> None:
    package, named = Path(owned_folder.__file__).parents[1], set[str]()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "OwnedFolder" in text and path.name != "owned_folder.py":
            found = re.findall(
                r"^_?[A-Z_]*(?:PREFIX|FOLDERS)\b[^=\n]*= (\".*\")$", text, re.MULTILINE
            )
            assert found, f"{path} makes a folder whose prefix is no constant"
            named |= {ast.literal_eval(each) for each in found}
    assert named == set(PREFIXES)


def test_no_other_folder_is_made_that_outlives_a_kill() -> None:
    package = Path(owned_folder.__file__).parents[1]
    makers = {
        str(path.relative_to(package)): len(found)
        for path in sorted(package.rglob("*.py"))
        if (found := re.findall(r"\b(?:mkdtemp|TemporaryDirectory|mkstemp)\(", path.read_text()))
    }
    assert makers == {
        "actors/owned_folder.py": 1,
        "envs/bench2drive/carla_side/vla_rl_route_server.py": 1,  # on CARLA's side, without vla_rl
        "models/language/tiny.py": 1,  # a tokenizer, read back at once
        "reporting/videos.py": 1,  # one frame, read back at once
        "sandbox/running_call.py": 1,  # inside the folder of the sandbox
    }, "use OwnedFolder, so that the next run removes what a killed one left"
