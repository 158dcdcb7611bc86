"""Tools and scorers for the tests of text environments; nothing of vla_rl, so that other processes
import it quickly.
"""

import asyncio
import os
import time
from typing import Any, Literal

import msgspec


class Trip(msgspec.Struct):
    """A way to go."""

    city: str
    days: int = 1


def plan(trip: Trip, others: list[Trip]) -> str:
    """Plans trips."""
    return ", ".join(f"{each.days} in {each.city}" for each in (trip, *others))


async def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """The weather in a city.

    Args:
        city: its name.
        days: from today on,
            at most 7.
    """
    return {"city": city, "degrees": [20] * days, "unit": unit}


async def slow() -> str:
    """Waits for ever."""
    await asyncio.Event().wait()
    return ""


async def broken() -> str:
    """Raises."""
    raise KeyError("nothing")


def hangs() -> str:
    """Hangs without awaiting anything."""
    while True:
        pass


def loud() -> str:
    """Prints a gigabyte."""
    for _ in range(1024):
        print("x" * (1 << 20))
    return "done"


def forks() -> str:
    """Forks without end."""
    while True:
        os.fork()


def crashes() -> str:
    """Ends its process."""
    os._exit(3)


def words(count: int) -> str:
    """So many words."""
    return "word " * count


def opens_a_name() -> str:
    """Raises with the name of a file, which is not UTF-8."""
    raise FileNotFoundError("caf\udce9")


def score_length(reply: str, row: dict[str, Any]) -> float:
    return len(reply) / row["length"]


def score_nothing(reply: str, row: dict[str, Any]) -> str:
    return "good"


def score_hangs(reply: str, row: dict[str, Any]) -> float:
    time.sleep(1000)
    return 1.0


def score_nan(reply: str, row: dict[str, Any]) -> float:
    return float("nan")


def score_inf(reply: str, row: dict[str, Any]) -> float:
    return float("inf")


def score_without_arguments() -> float:
    return 1.0


async def score_in_the_loop(reply: str, row: dict[str, Any]) -> float:
    return 1.0


NO_SCORER = 3
