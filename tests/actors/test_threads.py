"""Threads that would make a fork unsafe are found and named."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vla_rl.actors.threads import other_threads, refuse_threads


@contextmanager
def running(name: str) -> Iterator[None]:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name=name)
    thread.start()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


def test_a_thread_is_named_as_python_names_it_until_it_ends() -> None:
    before = other_threads()
    with running("keeps the lock"):
        assert sorted([*before, "keeps the lock"]) == other_threads()
    assert "keeps the lock" not in other_threads()


def test_threads_before_a_fork_are_refused_with_who_left_them() -> None:
    with (
        running("keeps the lock"),
        pytest.raises(RuntimeError, match=r"my_sim left \d+ threads running .*keeps the lock"),
    ):
        refuse_threads("my_sim")
