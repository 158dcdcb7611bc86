"""Printing to a terminal, pipe or disk that is gone or full: what is printed is dropped, and
nothing is raised.
"""

import errno
import io
import os
import subprocess
import sys
import textwrap

import pytest

from vla_rl.training.lasting_output import lasting_output


def printed_to(program: str, **streams: int) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        **streams,
    )


def test_a_pipe_without_a_reader_is_not_even_an_exit_status() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = """
        import sys
        from rich.console import Console
        from vla_rl.training.lasting_output import lasting_output
        with lasting_output():
            for number in range(3):
                print("x" * 100_000, flush=number == 1)
            print("a word", file=sys.stderr)
            Console().print("a table")
        sys.exit(7)
    """
    done = printed_to(program, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 7


def test_a_log_file_on_a_full_disk_is_written_again_when_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Disk(io.StringIO):
        is_full = False

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    monkeypatch.setattr(sys, "stdout", disk)
    with lasting_output():
        print("one")
        disk.is_full = True
        print("two", flush=True)
        disk.is_full = False
        print("three")
        assert sys.stdout.isatty() is False
    assert disk.getvalue() == "one\nthree\n"
    assert sys.stdout is disk
