"""The means of isolation that a kernel gives are used and keep attacks inside; one line says what the
missing ones leave open.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from as_user import CANNOT
from processes import said_by

from vla_rl.errors import ConfigError
from vla_rl.sandbox import Sandbox, SandboxConfig
from vla_rl.sandbox.protocol import ALL_MEANS, Means, find_exposures, usable_means

FIND = """
import errno, json, os, sys
from pathlib import Path
from vla_rl.sandbox import isolation

folder, name, error, num_refusals = Path(sys.argv[1], "empty"), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
folder.mkdir()
original, num_asked = getattr(isolation, name), 0

def refuse(*arguments, **options):
    global num_asked
    num_asked += 1
    if num_asked > num_refusals:
        return original(*arguments, **options)
    if error == 0:
        os._exit(1)
    raise OSError(error, os.strerror(error))

setattr(isolation, name, refuse)
means, refused = isolation.find_means(frozenset(["namespaces"]), folder)
print(json.dumps([sorted(means), refused, num_asked]))
"""
EPERM, ENOSPC, DIES = 1, 28, 0


@pytest.fixture
def gives_namespaces() -> None:
    if (
        subprocess.run(["unshare", "-Urpf", "true"], capture_output=True, check=False).returncode
        != 0
    ):
        pytest.skip("this kernel gives no namespaces to us")


@pytest.mark.usefixtures("gives_namespaces")
@pytest.mark.parametrize(("num_refusals", "num_asked"), [(0, 1), (3, 4)])
def test_a_kernel_that_is_out_of_namespaces_for_a_moment_is_asked_again(
    num_refusals: int, num_asked: int, tmp_path: Path
) -> None:
    found = json.loads(said_by(FIND, tmp_path, "fork_first_process", ENOSPC, num_refusals))
    assert found == [["namespaces"], {}, num_asked]


@pytest.mark.parametrize(("error", "num_asked"), [(ENOSPC, 4), (EPERM, 1)])
def test_a_kernel_that_goes_on_refusing_is_believed(
    error: int, num_asked: int, tmp_path: Path
) -> None:
    means, refused, asked = json.loads(said_by(FIND, tmp_path, "fork_first_process", error, 100))
    assert (means, list(refused), asked) == ([], ["namespaces"], num_asked)


@pytest.mark.usefixtures("gives_namespaces")
def test_means_that_kill_the_process_are_not_used(tmp_path: Path) -> None:
    found = json.loads(said_by(FIND, tmp_path, "map_user", DIES, 100))
    assert found[:2] == [[], {"namespaces": "a process isolated so died"}]


MISSING = """
import asyncio, json, logging
from vla_rl.sandbox import Sandbox
logging.basicConfig(level=logging.INFO, format="%(message)s")

async def main():
    async with Sandbox() as sandbox:
        result = await sandbox.run_program("print(open('stdin').read(), 5)")
        print(json.dumps([result.stdout, sandbox.missing]))

asyncio.run(main())
"""


@pytest.mark.usefixtures("gives_namespaces")
def test_calls_run_on_a_kernel_that_gives_no_namespaces_and_one_line_says_what_follows() -> None:
    """It refuses to make them in a namespace of users whose limit is 0."""
    refusing = 'echo 0 > /proc/sys/user/max_pid_namespaces && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", refusing, "sh", sys.executable, "-c", MISSING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    stdout, missing = json.loads(done.stdout)
    assert stdout == " 5\n"
    assert missing["namespaces"] == "clone3: No space left on device"
    assert missing["own_user"].startswith("this namespace of users has no user 10")
    (line,) = done.stderr.splitlines()
    assert line.startswith("sandboxed calls can ")
    assert (
        "as they are isolated without namespaces (clone3: "
        "No space left on device), own_user (" in line
    )
    assert line.endswith("processes are limited all the same, and no process outlives its call")


async def test_what_is_left_out_by_configuration_is_logged_once_for_all_call_runners(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Sandbox(SandboxConfig(without=("namespaces", "seccomp"))) as sandbox:
        with caplog.at_level(logging.INFO):
            result = await sandbox.run_program("print(5)")
            assert (result.stdout, result.is_offline) == ("5\n", False)
            runner = sandbox.runner_pid
            assert runner is not None
            os.kill(runner, signal.SIGKILL)
            while (await sandbox.run_program("print(5)")).fault == "died":
                pass
            assert sandbox.runner_pid != runner
    assert (
        sandbox.missing["namespaces"] == sandbox.missing["seccomp"] == "left out by configuration"
    )
    assert sum("use the network, also with network=False" in line for line in caplog.messages) == 1


def test_means_are_known_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"SandboxConfig.without is \('selinux',\), expected a list of 'namespaces', 'mounts'",
    ):
        SandboxConfig(without=("selinux",))  # type: ignore[arg-type]


def test_mounts_come_with_namespaces_only_and_a_user_of_its_own_with_root_only() -> None:
    assert usable_means(is_root=True, without=()) == ALL_MEANS
    assert usable_means(is_root=False, without=("seccomp",)) == {"namespaces", "mounts", "landlock"}
    assert usable_means(is_root=True, without=("namespaces",)) == {
        "own_user",
        "landlock",
        "seccomp",
    }


@pytest.mark.parametrize(
    ("means", "words"),
    [
        (["namespaces", "mounts", "landlock", "seccomp"], []),
        (["own_user", "landlock", "seccomp"], []),
        (["landlock", "seccomp"], ["change modes and times"]),
        (["own_user", "seccomp"], ["write what every user can", "fill the disk"]),
        (["namespaces", "seccomp"], ["write wherever this user can", "fill the disk"]),
        (["namespaces", "mounts", "seccomp"], ["write to devices"]),
        (["namespaces", "mounts", "landlock"], ["connect to unix sockets"]),
        (["namespaces", "own_user", "landlock"], ["set attributes", "connect to unix sockets"]),
        ([], ["write wherever", "fill the disk", "end this user's processes", "use the network"]),
    ],
)
def test_what_calls_can_do_follows_from_the_means(
    means: Sequence[Means], words: Sequence[str]
) -> None:
    found = find_exposures(frozenset(means), signals_are_confined=True)
    assert len(found) == len(words)
    assert all(line.startswith(beginning) for line, beginning in zip(found, words, strict=True))


def test_signals_are_open_to_calls_whose_landlock_is_too_old_for_them() -> None:
    means: frozenset[Means] = frozenset(["mounts", "landlock", "seccomp"])
    assert find_exposures(means, signals_are_confined=False) == ["end this user's processes"]


SUPPORT = Path(__file__).parent / "support"
PAGE = Path(__file__).parents[2] / "docs" / "text_environments.md"
TABLE = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in re.findall(r"^\| a call can \|.*?\n\n", PAGE.read_text(), re.DOTALL | re.MULTILINE)[
        0
    ]
    .strip()
    .splitlines()
]
COLUMNS = TABLE[0][1:]
LEFT_OUT = {
    "no namespaces": ("namespaces",),
    "no Landlock": ("landlock",),
    "neither": ("namespaces", "landlock"),
}


def attacked(column: str) -> dict[str, Any]:
    """Findings of `attacks.py`, as the user and with the means of a column."""
    who, _, rest = column.partition(", ")
    as_user = [str(SUPPORT / "as_user.py")] if who == "user" and os.geteuid() == 0 else []
    without = LEFT_OUT.get(rest, ())
    command = [
        sys.executable,
        *as_user,
        str(SUPPORT / "attacks.py"),
        json.dumps({"without": without}),
    ]
    search = os.pathsep.join([*(path for path in sys.path if path), str(SUPPORT)])
    environment = {**os.environ, "PYTHONPATH": search, "SECRET": "token"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    if unexpected := set(found["missing"]) - set(without):
        pytest.skip(f"this kernel gives no {', '.join(unexpected)}")
    return found


IN_THE_SUITE = {"root", "user, neither"}
"""Columns with each user once, with all means and with none; the other six are proofs."""


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(
            column,
            marks=[pytest.mark.proof] * (column not in IN_THE_SUITE)
            + [pytest.mark.needs_root] * column.startswith("root"),
        )
        for column in COLUMNS
    ],
)
def test_attacks_find_what_the_table_of_the_docs_says(column: str) -> None:
    index = COLUMNS.index(column) + 1
    can = {row[0]: {"yes": True, "no": False}[row[index]] for row in TABLE[2:]}
    found = attacked(column)
    assert found["program"] == {**can, "error": "", "is offline": True}
    assert found["function"] == {**can, "error": "", "is offline": True}
    rest = column.partition(", ")[2]
    if rest in ("", "no namespaces"):
        assert_limits_hold(found, has_mounts=rest == "")


def assert_limits_hold(found: dict[str, Any], *, has_mounts: bool) -> None:
    if has_mounts:
        for name in ("files", "removed files", "/dev/shm"):
            assert found[name].endswith("OSError: [Errno 28] No space left on device")
    else:
        assert (
            found["files"] == found["removed files"] == "it wrote more than 48 MiB or 10000 "
            "files and was stopped"
        )
        assert "Permission denied: '/dev/shm/part0'" in found["/dev/shm"]
    for name in ("memory", "shared memory"):
        assert found[name] == "it held more than 150 MiB of memory in all and was stopped"


def test_the_table_has_the_eight_columns() -> None:
    assert set(COLUMNS) > IN_THE_SUITE
    assert [
        f"{who}{rest}"
        for who in ("root", "user")
        for rest in ("", ", no namespaces", ", no Landlock", ", neither")
    ] == COLUMNS
