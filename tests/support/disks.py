"""Disks that are full for a while: one that is made up, for files that the product appends to, and
a real one.
"""

import contextlib
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vla_rl.util import appended_file


class SmallDisk:
    """Stands in for the system call behind `AppendedFile`: writes what there is room for, and then
    raises ENOSPC.

    Args:
        monkeypatch: puts it in place.
        room: bytes that find a place; None for any number.
        of: part of the names of the files that are on this disk; others find room.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, room: int | None = None, of: str = ""
    ) -> None:
        self.room, self._of = room, of
        monkeypatch.setattr(appended_file, "_write", self._write)

    def _write(self, descriptor: int, data: memoryview) -> int:
        if self.room is None or self._of not in os.readlink(f"/proc/self/fd/{descriptor}"):
            return os.write(descriptor, data)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written


@contextlib.contextmanager
def tmpfs(size: str) -> Iterator[Path]:
    """A file system of its own, of this size; skips the test for a user who may not mount one."""
    folder = Path(tempfile.mkdtemp(prefix="vla-rl-small-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    is_mounted = (
        shutil.which("mount") is not None
        and subprocess.run(mount, capture_output=True).returncode == 0
    )
    try:
        if not is_mounted:
            pytest.skip("needs the right to mount a tmpfs")
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
