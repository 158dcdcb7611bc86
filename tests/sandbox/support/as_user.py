"""Runs a program as an ordinary user, for tests that may themselves run as root:
`python as_user.py program [arguments]`.

Root may keep its interpreter in a folder that is closed to others. In a mount namespace of this
process alone, every closed folder above it is covered by an open one, which holds the way to the
interpreter.
"""

import ctypes
import os
import sys
import tempfile
from pathlib import Path

UID = 54321
CANNOT = 77
"""Exit status if this root cannot become a user that may read its interpreter."""

CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 0x1000, 0x4000, 0x40000, 2
libc = ctypes.CDLL(None, use_errno=True)


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    if libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]) != 0:
        raise OSError(ctypes.get_errno(), f"mount of {target}")


def closed_folder_above(path: Path) -> Path | None:
    return next(
        (folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None
    )


def open_the_way_to(path: Path) -> None:
    while (closed := closed_folder_above(path)) is not None:
        inside = path.relative_to(closed).parts[0]
        with tempfile.TemporaryDirectory() as aside:
            Path(aside, inside).mkdir()
            mount(str(closed / inside), str(Path(aside, inside)), None, MS_BIND | MS_REC)
            mount("open", str(closed), "tmpfs", 0, "mode=755")
            (closed / inside).mkdir()
            mount(str(Path(aside, inside)), str(closed / inside), None, MS_BIND | MS_REC)
            libc.umount2(str(Path(aside, inside)).encode(), MNT_DETACH)


def become_user() -> None:
    needed = [
        path for path in (Path(sys.base_prefix, "lib"), *map(Path, sys.path)) if path.exists()
    ]
    if any(map(closed_folder_above, needed)):
        if libc.unshare(CLONE_NEWNS) != 0:
            print(
                "this root may not mount, and no other user may read its interpreter",
                file=sys.stderr,
            )
            raise SystemExit(CANNOT)
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        for path in needed:
            open_the_way_to(path)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)


if __name__ == "__main__":
    if os.geteuid() == 0:
        become_user()
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
