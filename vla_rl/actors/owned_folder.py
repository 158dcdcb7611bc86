"""A temporary folder that is removed with its owner.

If the owner was killed, the next process that makes one with the same prefix removes it.

The folder is locked while its owner is alive, and the kernel releases the lock however the owner
ends. A folder without a lock therefore belonged to a process that was killed.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

PREFIXES: Final = (
    "vla_rl-hosts-",
    "vla_rl-policy-",
    "vla_rl-rank-files-",
    "vla_rl-ranks-",
    "vla_rl-ray-host-",
    "vla_rl-weights-",
    "vla_rl_sandbox.",
    "vla_rl_vllm_",
)
"""Prefixes of all such folders; a run sweeps them when it starts."""


class OwnedFolder:
    """A new folder that only this user may enter.

    Args:
        prefix: beginning of its name; `sweep` removes all unlocked temporary folders with this prefix.
        parent: folder that it is made in; None for the folder of temporary ones.

    Attributes:
        path: the folder.
        descriptor: holds the lock. A child that inherits it is an owner too: the folder is swept
            after the last one ends.
    """

    def __init__(self, prefix: str, parent: str | None = None) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            # another process swept it before it was locked
            with contextlib.suppress(FileNotFoundError):
                self.descriptor = _opened(self.path)
                try:
                    _lock(self.descriptor, self.path, fcntl.LOCK_EX)
                    return
                except FileNotFoundError:
                    os.close(self.descriptor)
                    raise
                except OSError as error:
                    logger.warning(
                        "%s cannot be locked (%s), so it stays if this process is killed.",
                        self.path,
                        error,
                    )
                    return

    def remove(self) -> None:
        """Remove the folder and its content, then release the lock."""
        remove_tree(self.path)
        os.close(self.descriptor)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content, as far as this user's permissions allow."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # it has folders without permissions, or folders nested thousands deep
        for command in (("chmod", "-R", "u+rwX"), ("rm", "-rf")):
            subprocess.run([*command, "--", folder], stderr=subprocess.DEVNULL, check=False)


def sweep_all() -> None:
    """Remove all folders that killed processes of vla_rl have left."""
    for prefix in PREFIXES:
        sweep(prefix)


def sweep(prefix: str) -> None:
    """Remove the temporary folders of a prefix whose owners have ended.

    Only those: on a file system of several hosts, locks of the others may not be seen.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # it is in use, another user's, or already removed
            descriptor = _opened(folder)
            try:
                _lock(descriptor, folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(folder)
            finally:
                os.close(descriptor)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _lock(descriptor: int, folder: Path, lock: int) -> None:
    """Lock an open folder.

    Raises: OSError; FileNotFoundError if another process removed it meanwhile.
    """
    fcntl.flock(descriptor, lock)
    if not os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
        raise FileNotFoundError(f"{folder} was removed and made again")
