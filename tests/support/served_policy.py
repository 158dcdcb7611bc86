"""`vla-rl serve` in a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vla_rl.models.shipped import BASE_POLICY


@contextmanager
def serving(
    *options: str, checkpoint: str = str(BASE_POLICY)
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the server's address and its process, which is killed at the end if it still runs."""
    command = [sys.executable, "-m", "vla_rl.cli.main", "serve", checkpoint, "--server.port", "0"]
    process = subprocess.Popen([*command, *options], text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving at "):
                yield line.split()[2].rstrip(";"), process
                return
        raise AssertionError(f"the server ended with status {process.wait()}")
    finally:
        process.kill()
        process.communicate()
