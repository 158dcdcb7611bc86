"""Limits of this process that leave no room for its children are named before the first
one starts.
"""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from vla_rl.util import rlimits
from vla_rl.util.rlimits import DESCRIPTORS_OF_A_PROCESS

REQUIRE = """
import resource
from vla_rl.util.rlimits import require_process_limits

resource.setrlimit({limit}, ({soft}, {hard}))
try:
    require_process_limits({num}, num_extra=4, shared_bytes=256 << 20, remedy="take fewer of them")
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


COUNT_OF_A_CHILD = """
import asyncio
import os
from sample_actors import Counter
from vla_rl.actors import ChildProcess, ForkServer, Runtime

async def main():
    async with Runtime() as runtime:
        await runtime.spawn(Counter, placement={placement})
        before = len(os.listdir("/proc/self/fd"))
        await runtime.spawn(Counter, placement={placement})
        print(len(os.listdir("/proc/self/fd")) - before)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "placement", ["ChildProcess()", "ChildProcess(fork_from=ForkServer())"], ids=["fresh", "forked"]
)
def test_a_child_takes_the_descriptors_that_are_counted_for_it(
    program_environment: dict[str, str], placement: str
) -> None:
    # in a process of its own: what earlier tests left open here may close between the two counts
    ended = subprocess.run(
        [sys.executable, "-c", COUNT_OF_A_CHILD.format(placement=placement)],
        env=program_environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout == f"{DESCRIPTORS_OF_A_PROCESS}\n", ended.stderr


# ---- threads, and the size of files


LIMITED = """
from vla_rl.util import rlimits as room
room._count_user_threads = lambda: 30
room.read_cgroup_limits = lambda *_: ()
room.os.getuid = lambda: 1000
room.resource.getrlimit = lambda kind: ({most}, {most}) if kind == room.resource.RLIMIT_NPROC else (-1, -1)
try:
    room.require_process_limits(2, num_extra=0, shared_bytes=256 << 20, remedy="take fewer of them")
    room.require_run_limits()
    print("there is room")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (
            33,
            "ConfigError `ulimit -u`, for all processes of this user, is 33 and 30 are used, but 2 ",
        ),
        (50, "there is room"),
    ],
)
def test_too_few_threads_are_named_with_the_limit(
    program_environment: dict[str, str], most: int, words: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED.format(most=most)],
        env=program_environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ended.stdout.startswith(words), ended.stdout + ended.stderr


def test_the_tightest_cgroup_above_this_process_counts(tmp_path: Path) -> None:
    (tmp_path / "pids" / "outer" / "inner").mkdir(parents=True)
    for folder, most, used in (("outer", "100", 97), ("outer/inner", "max", 40)):
        (tmp_path / "pids" / folder / "pids.max").write_text(f"{most}\n")
        (tmp_path / "pids" / folder / "pids.current").write_text(f"{used}\n")
    listed = "12:memory:/elsewhere\n8:pids:/outer/inner\n0::/\n"
    (found,) = rlimits.read_cgroup_limits(listed, tmp_path)
    assert (found.most, found.used) == (100, 97)
    assert found.what == f"pids.max of the cgroup {tmp_path / 'pids' / 'outer'}"


def test_an_error_that_a_thread_too_many_caused_names_the_limit() -> None:
    first = RuntimeError("can't start new thread")
    last = RuntimeError("cannot join thread before it is started")
    last.__context__ = first
    words = rlimits.explain_thread_limit(ExceptionGroup("two tasks", [ValueError("other"), last]))
    assert words is not None
    assert "no further process or thread can be started" in words
    assert "4 for each simulator" in words
    assert rlimits.explain_thread_limit(ValueError("can't start new thread")) is None


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("NOFILE", 16, "error: `ulimit -n` is 16, at most 16 here, but a run needs about "),
        ("FSIZE", 65536, "error: `ulimit -f` is 64 KiB, expected at least 16384: "),
    ],
)
def test_a_limit_is_named_before_a_run_writes_anything(
    program_environment: dict[str, str], tmp_path: Path, limit: str, value: int, words: str
) -> None:
    kind = getattr(resource, f"RLIMIT_{limit}")
    command = [sys.executable, "-m", "vla_rl.recipes.train_toy", "--run.root", str(tmp_path)]
    ended = subprocess.run(
        command,
        env=program_environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
    )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(words)
    assert not list(tmp_path.iterdir())
