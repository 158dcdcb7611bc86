"""Helper processes that are the targets of faults: started below the try's folder, read line by
line.
"""

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from benchmarks.faults.one_try import Try

ANSWERS_WITHIN_S: Final = 60.0


def get_environment(case: Try) -> dict[str, str]:
    """Return the environment of a try's processes: temporary files in its folder, one compute
    thread, unbuffered output.
    """
    return {
        **os.environ,
        "TMPDIR": str(case.temporary),
        # Torch keeps a cache of its own in TMPDIR between runs, which is not a leftover.
        "TORCHINDUCTOR_CACHE_DIR": str(case.folder / "torch_cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


class Target:
    """A module that runs as a process; `with` always kills it at the end.

    Args:
        case: the try; its temporary folder becomes the process's TMPDIR.
        module: run as `python -m module`.
        arguments: arguments of the module.
    """

    def __init__(self, case: Try, module: str, arguments: Sequence[str] = ()) -> None:
        self._case, self._command = case, [sys.executable, "-m", module, *arguments]
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        with (self._case.folder / "target-errors.txt").open("ab") as errors:
            self.process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
                env=get_environment(self._case),
            )
        # A thread reads, because select does not see lines that a buffered file already holds.
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        # Its descendants hold the other end of the pipe until they are gone, so that waiting here
        # waits for them too.
        self._reader.join(ANSWERS_WITHIN_S)
        assert self.process.stdout is not None
        if not self._reader.is_alive():
            self.process.stdout.close()

    def until_line(self, begins: str, within_s: float = ANSWERS_WITHIN_S) -> str | None:
        """Wait for the next line that begins with `begins`, skipping others.

        None if none came in time.
        """
        until = time.monotonic() + within_s
        while (left := until - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                return None
            if line is None or line.startswith(begins):
                return line
        return None

    def forget_lines(self) -> None:
        """Drop the lines that were printed so far."""
        while not self._lines.empty():
            self._lines.get()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)
