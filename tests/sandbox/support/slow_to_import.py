"""A module that takes its time."""

import time

time.sleep(4.0)


def answer() -> int:
    return 42
