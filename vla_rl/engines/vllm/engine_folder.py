"""The folder of one `VllmEngine`: files for its processes, sockets, temporary files."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from vla_rl.actors.owned_folder import OwnedFolder, sweep
from vla_rl.errors import ConfigError

_PREFIX: Final = "vla_rl_vllm_"
_LONGEST: Final = 107 - len("/123e4567-e89b-12d3-a456-426614174000")
"""Longest folder path, in characters, with which the paths of vLLM's sockets in it are short enough
for Linux."""


@contextmanager
def engine_folder() -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it at the end.

    Also removes folders of killed processes.

    Raises: ConfigError if its path is too long for sockets.
    """
    sweep(_PREFIX)
    folder = OwnedFolder(_PREFIX)
    try:
        if (length := len(str(folder.path))) > _LONGEST:
            raise ConfigError(
                f"the engines' sockets would lie in {folder.path}, a path of {length} characters, "
                f"expected at most {_LONGEST}; set TMPDIR to a shorter one"
            )
        yield folder.path
    finally:
        folder.remove()
