"""The last words of a child are kept, and all of them are passed on under its name."""

import os
from collections.abc import Iterator

import pytest

from vla_rl.actors.processes.started_process import StderrTail


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


async def test_lines_are_passed_on_with_the_name_of_the_child(
    pipe: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    tail = StderrTail(pipe[0], "env-3")
    os.write(pipe[1], b"one\ntwo\nunfinished")
    tail.close()
    assert capsys.readouterr().err == "[env-3] one\n[env-3] two\n[env-3] unfinished\n"
    assert tail.last_lines == ("one", "two", "unfinished")


async def test_only_the_last_twenty_lines_are_kept(pipe: tuple[int, int]) -> None:
    tail = StderrTail(pipe[0], "env-3")
    os.write(pipe[1], b"".join(b"%d\n" % number for number in range(30)))
    tail.close()
    assert tail.last_lines == tuple(str(number) for number in range(10, 30))


async def test_a_line_without_end_is_cut(pipe: tuple[int, int]) -> None:
    tail = StderrTail(pipe[0], "env-3")
    os.write(pipe[1], b"x" * 5000)
    tail.close()
    assert {len(line) for line in tail.last_lines} == {2000}


async def test_the_rest_is_read_without_waiting_for_who_still_holds_the_pipe(
    pipe: tuple[int, int],
) -> None:
    tail = StderrTail(pipe[0], "env-3")
    tail.close()
    tail.close()
    with pytest.raises(BrokenPipeError):
        os.write(pipe[1], b"nobody reads")
