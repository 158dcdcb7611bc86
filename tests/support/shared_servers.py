"""Fork servers that all runs of a file of tests/run share: `pytestmark = SHARES_SERVERS`."""

from typing import Final

import pytest

from vla_rl.actors import LastingForkServers

SHARES_SERVERS: Final = [
    pytest.mark.usefixtures("servers"),
    pytest.mark.asyncio(loop_scope="module"),
    # the mark is for all tests of the file, and some are no coroutines
    pytest.mark.filterwarnings("ignore:The test .* is marked with:pytest.PytestWarning"),
]

_opened: list[LastingForkServers] = []


def open_to_file(servers: LastingForkServers) -> None:
    """Let the file's own functions find the servers of its fixture."""
    _opened[:] = [servers]


def servers_of_file() -> LastingForkServers:
    """Return the servers of the file that runs."""
    return _opened[0]
