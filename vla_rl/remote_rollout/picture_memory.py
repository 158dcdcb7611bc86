"""Memory with pictures that other processes of this host open by path."""

import os
from collections.abc import Sequence

import numpy as np

from vla_rl.types.shelved import KEY_BYTES


class PictureMemory:
    """Rows of bytes, end to end, behind a key; a kill leaves nothing behind.

    Args:
        key: whose pictures they are.
        rows: uint8 [bytes] each.

    Attributes:
        path: opens it, for processes of the same user.
        num_bytes: without the key.
    """

    def __init__(self, key: int, rows: Sequence[np.ndarray]) -> None:
        self._descriptor = os.memfd_create("vla_rl_pictures", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.num_bytes = sum(row.nbytes for row in rows)
        try:
            self._write(memoryview(key.to_bytes(KEY_BYTES, "little")))
            for row in rows:
                self._write(row.data)
        except BaseException:
            self.close()
            raise

    def read(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return spans of bytes, end to end; they count from the beginning of the memory.

        Raises: ValueError for a span outside of it.
        """
        size = KEY_BYTES + self.num_bytes
        # another process has named them, and `pread` takes the memory before it reads
        if outside := [each for each in spans if not 0 <= each[0] <= each[1] <= size]:
            raise ValueError(f"bytes {outside[0]} are wanted, expected some of 0 to {size}")
        found = [os.pread(self._descriptor, end - begin, begin) for begin, end in spans]
        return np.frombuffer(b"".join(found), np.uint8)

    def close(self) -> None:
        """Free it; processes that have opened it still read it."""
        os.close(self._descriptor)

    def _write(self, rest: memoryview) -> None:
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]
