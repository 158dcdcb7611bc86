"""Atomic replacement of a file: at any instant it is the old one or the new one."""

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, sync it, and rename it into place.

    Raises: OSError; no part of the new file stays.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
