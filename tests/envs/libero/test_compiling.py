"""Processes that start together compile the control step once."""

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from vla_rl.envs.libero import stepping
from vla_rl.envs.libero.stepping import call_compiled


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """The lock, as another process has it open."""
    monkeypatch.setattr(stepping, "cache_folder", lambda: tmp_path)
    with (tmp_path / "compiling.lock").open("w") as lock:
        yield lock


def is_free(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


class Code:
    """A function as numba keeps it: its overloads are there from the first call on."""

    def __init__(self, lock: TextIO) -> None:
        self.overloads: dict[str, object] = {}
        self._lock = lock

    def __call__(self) -> bool:
        """Return whether another process could compile now."""
        self.overloads["()"] = None
        return is_free(self._lock)


def test_the_first_call_of_a_process_compiles_alone(lock: TextIO) -> None:
    code = Code(lock)
    assert not call_compiled(code)
    assert is_free(lock)
    assert call_compiled(code), "there is nothing left to compile"


def test_a_process_that_is_stopped_while_it_compiles_delays_others_and_no_more(
    lock: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "COMPILE_WAIT_S", 0.01)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert call_compiled(Code(lock))  # the same open file: its own lock is no obstacle to it
