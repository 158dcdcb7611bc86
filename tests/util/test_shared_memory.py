"""Memory that processes share: its size is final, and a limit that forbids it is named."""

import mmap
import os
import subprocess
import sys

import pytest

from vla_rl.util.shared_memory import memory_file


def test_no_process_can_shorten_or_lengthen_the_memory_of_others() -> None:
    descriptor = memory_file("test", 3 * mmap.PAGESIZE)
    try:
        assert os.fstat(descriptor).st_size == 3 * mmap.PAGESIZE
        for size in (0, mmap.PAGESIZE, 4 * mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, 0) as memory:
            memory[-1] = 7
            assert os.pread(descriptor, 1, 3 * mmap.PAGESIZE - 1) == b"\x07"
    finally:
        os.close(descriptor)


def test_a_limit_on_the_size_of_files_is_named_with_what_to_do() -> None:
    script = (
        "import resource\n"
        "from vla_rl.util.shared_memory import memory_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    memory_file('test', 1 << 20)\nexcept OSError as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == (
        "[Errno 27] 1048576 bytes of memory for processes to share cannot be made: the limit on the "
        "size of files is 65536 bytes and holds for them too, expected none; set `ulimit -f "
        "unlimited`\n"
    )
