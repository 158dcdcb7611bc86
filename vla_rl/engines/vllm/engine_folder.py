"""The folder of one `VllmEngine`: the files that its engine processes read, vLLM's sockets, and their temporary files.

Its owner holds a lock on it for as long as it lives, whatever ends it. So the next engine can tell the folders of killed
runs from those in use.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vla_rl.errors import ConfigError

_PREFIX: Final = "vla_rl_vllm_"
_LONGEST: Final = 107 - len("/123e4567-e89b-12d3-a456-426614174000")
"""Characters of a folder in which vLLM's sockets, named like that, have paths that Linux takes."""

_NEW_FOR_S: Final = 3600.0
"""Age up to which an empty folder is left alone: its owner may not have locked it yet."""


@contextmanager
def engine_folder() -> Iterator[Path]:
    """A new folder that only this user may enter; removed afterwards, as are the folders of owners that were killed.

    Raises: ConfigError where its path is too long for sockets.
    """
    _remove_left_behind()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name:
        if len(name) > _LONGEST:
            raise ConfigError(
                f"the engines' sockets would lie in {name}, a path of {len(name)} characters, expected at most {_LONGEST}; "
                "set TMPDIR to a shorter one"
            )
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_left_behind() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone by now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.listdir(descriptor) or time.time() - os.fstat(descriptor).st_mtime > _NEW_FOR_S:
                shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)
