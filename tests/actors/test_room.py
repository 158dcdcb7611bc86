"""Limits of this process that leave no room for its children are named before the first
one starts.
"""

import asyncio
import gc
import os
import subprocess
import sys

import pytest
from sample_actors import Counter

from vla_rl.actors import ChildProcess, ForkServer, Runtime
from vla_rl.actors.room import DESCRIPTORS_OF_A_PROCESS

REQUIRE = """
import resource
from vla_rl.actors import ChildProcess
from vla_rl.actors.room import require_room

resource.setrlimit({limit}, ({soft}, {hard}))
try:
    require_room({num}, ChildProcess(), beside=4, remedy="take fewer of them")
except Exception as error:
    print(type(error).__name__, error)
print(resource.getrlimit({limit}))
"""


def outcome_of(
    program_environment: dict[str, str], limit: str, soft: int | str, hard: int | str, num: int
) -> str:
    """What a fresh process under these limits prints."""
    source = REQUIRE.format(limit=f"resource.{limit}", soft=soft, hard=hard, num=num)
    command = [sys.executable, "-c", source]
    ended = subprocess.run(
        command, env=program_environment, capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout + ended.stderr


def test_too_few_descriptors_are_named_with_the_command_that_helps(
    program_environment: dict[str, str],
) -> None:
    told = outcome_of(program_environment, "RLIMIT_NOFILE", 128, 128, 16)
    assert told.startswith(
        "ConfigError `ulimit -n` is 128, at most 128 here, but 16 child processes need about 2"
    )
    assert "up to 20 processes take 10 each" in told
    assert "run `ulimit -n 2" in told
    assert "or take fewer of them." in told


def test_a_soft_limit_on_descriptors_is_raised_with_a_line(
    program_environment: dict[str, str],
) -> None:
    told = outcome_of(program_environment, "RLIMIT_NOFILE", 128, 1000, 16)
    assert "(1000, 1000)" in told
    assert (
        "raised `ulimit -n` of this process from 128 to 1000: 16 child processes need about" in told
    )
    assert "ConfigError" not in told


def test_a_limit_that_suffices_is_left_alone(program_environment: dict[str, str]) -> None:
    assert outcome_of(program_environment, "RLIMIT_NOFILE", 500, 1000, 16) == "(500, 1000)\n"


def test_too_little_address_space_is_named_and_not_raised(
    program_environment: dict[str, str],
) -> None:
    three_gib = 3 << 30
    told = outcome_of(program_environment, "RLIMIT_AS", three_gib, "resource.RLIM_INFINITY", 16)
    assert told.startswith(
        "ConfigError `ulimit -v` is 3145728 KiB, but 16 child processes need about 1"
    )
    assert "up to 20 processes share 524288 KiB each" in told
    assert "run `ulimit -v unlimited`" in told
    assert f"({three_gib}, -1)" in told


@pytest.mark.parametrize(
    "placement", [ChildProcess(), ChildProcess(fork_from=ForkServer())], ids=["fresh", "forked"]
)
async def test_a_child_takes_the_descriptors_that_are_counted_for_it(
    placement: ChildProcess,
) -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        await runtime.spawn(Counter, placement=placement)
        gc.collect()  # what earlier tests have left is not closed in between
        before = len(os.listdir("/proc/self/fd"))
        await runtime.spawn(Counter, placement=placement)
        assert len(os.listdir("/proc/self/fd")) - before == DESCRIPTORS_OF_A_PROCESS
