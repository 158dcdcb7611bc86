"""Functions that a sandbox has to survive."""

import os
import subprocess
import sys
import time
from typing import Any


def add(left: int, right: int) -> int:
    return left + right


def raises() -> None:
    raise ValueError("seven is no colour")


def hangs() -> None:
    while True:
        pass


def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


def prints_a_gigabyte() -> str:
    for _ in range(1024):
        sys.stdout.write("x" * (1 << 20))
    return "done"


def prints_bytes_that_are_no_text() -> str:
    os.write(1, b"\xff\xfe fine")
    return "done"


def returns_a_lot() -> str:
    return "x" * (4 << 20)


def returns_something_strange() -> Any:
    return object()


def forks_without_end() -> None:
    while True:
        os.fork()


def forks(times: int, seconds: float = 0.5) -> int:
    """How many processes there were at once, this one included."""
    children = []
    for _ in range(times):
        pid = os.fork()
        if pid == 0:
            time.sleep(seconds)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return 1 + len(children)


def leaves_a_process_behind(seconds: float) -> int:
    """Two forks and a session of its own: nobody's child any more."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, b"%d" % os.getpid())
            marker = subprocess.Popen(["sleep", str(seconds)])
            marker.wait()
            os._exit(0)
        os._exit(0)
    return int(os.read(reading, 20))


def exits(code: int) -> None:
    os._exit(code)


def asks_to_exit() -> None:
    sys.exit("enough")


def eats_memory() -> int:
    return len(bytearray(8 << 30))


def fills_a_file(megabytes: int) -> str:
    with open("big", "wb") as file:
        for _ in range(megabytes):
            file.write(b"x" * (1 << 20))
    return "written"


def environment() -> dict[str, str]:
    return dict(os.environ)


def folder() -> tuple[str, list[str]]:
    return os.getcwd(), os.listdir(".")
