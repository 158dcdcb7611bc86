"""Descriptors of any number are looked at.

A runtime of hundreds of processes has those beyond select()'s.
"""

import fcntl
import os
import resource

import pytest

from vla_rl.actors.readiness import is_ready


def test_a_descriptor_above_1023_is_ready_once_something_was_written() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1500)
    try:
        assert not is_ready(high)
        os.write(writing, b"!")
        assert is_ready(high)
    finally:
        for fd in (reading, writing, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
