"""No process and no folder of a sandbox outlives its call runner or its owner, whatever ends them and
whatever a call tries.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from as_user import CANNOT
from processes import all_end

SUPPORT = Path(__file__).parent / "support"
WITHIN_S = 60.0


class Owner(NamedTuple):
    """A process with a sandbox, and what belongs to it."""

    process: "subprocess.Popen[str]"
    reaper: int
    runner: int
    below: list[int]
    """Calls, and all that they started."""

    pidfds: list[int]
    """Descriptors of the reaper, the call runner and all below."""

    folder: Path
    import_started: Path

    def all_of_it_ends(self) -> bool:
        return all_end(map(os.dup, self.pidfds), WITHIN_S)


def command(who: str, *arguments: str) -> list[str]:
    """Command that runs a Python program as root or as an ordinary user."""
    as_user = [str(SUPPORT / "as_user.py")] if who == "user" and os.geteuid() == 0 else []
    return [sys.executable, *as_user, *arguments]


@contextlib.contextmanager
def owner(who: str, without: tuple[str, ...] = ()) -> Iterator[Owner]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        environment = {
            **os.environ,
            "TMPDIR": str(folder),
            "IMPORT_BEGUN": str(folder / "import_begun"),
        }
        environment["PYTHONPATH"] = os.pathsep.join(
            [path for path in sys.path if path] + [str(SUPPORT)]
        )
        process = stack.enter_context(
            subprocess.Popen(
                command(who, str(SUPPORT / "owner.py"), json.dumps({"without": without})),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line and process.wait() == CANNOT:
            pytest.skip("this root cannot become another user")
        told = json.loads(line)
        told["folder"] = Path(told["folder"])
        pidfds = [os.pidfd_open(pid) for pid in (told["reaper"], told["runner"], *told["below"])]
        for fd in pidfds:
            stack.callback(kill_and_close, fd)
        yield Owner(process, **told, pidfds=pidfds, import_started=folder / "import_begun")


def until_exists(path: Path) -> None:
    until = time.monotonic() + WITHIN_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert path.exists()


def kill_and_close(pidfd: int) -> None:
    """A test that fails leaves nothing either."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


EVERYWHERE = pytest.mark.parametrize(
    ("who", "without"),
    [
        pytest.param("root", (), marks=pytest.mark.needs_root),
        pytest.param("root", ("namespaces",), marks=[pytest.mark.proof, pytest.mark.needs_root]),
        pytest.param("user", (), marks=pytest.mark.proof),
        ("user", ("namespaces", "landlock", "seccomp")),
    ],
    ids=["root", "root without namespaces", "user", "user without anything"],
)

AT_BOTH_ENDS = pytest.mark.parametrize(
    ("who", "without"),
    [
        # the kernel ends what is in a namespace; without one, all of it is ours to end
        pytest.param("root", (), marks=[pytest.mark.proof, pytest.mark.needs_root]),
        ("user", ("namespaces", "landlock", "seccomp")),
    ],
    ids=["root", "user without anything"],
)


@EVERYWHERE
def test_everything_below_a_call_runner_that_is_killed_dies_with_it(
    who: str, without: tuple[str, ...]
) -> None:
    with owner(who, without) as one:
        os.kill(one.runner, signal.SIGKILL)
        assert one.all_of_it_ends()
        assert not one.folder.exists()


def kill_owner(one: Owner) -> None:
    one.process.kill()
    one.process.wait()


@AT_BOTH_ENDS
def test_everything_ends_with_an_owner_that_is_killed_while_its_call_runner_is_stopped(
    who: str, without: tuple[str, ...]
) -> None:
    with owner(who, without) as one:
        os.kill(one.runner, signal.SIGSTOP)
        kill_owner(one)
        assert one.all_of_it_ends()
        assert not one.folder.exists()


@AT_BOTH_ENDS
def test_everything_ends_with_an_owner_that_is_killed_while_all_of_its_processes_are_stopped(
    who: str, without: tuple[str, ...]
) -> None:
    with owner(who, without) as one:
        for pid in (one.process.pid, one.reaper, one.runner, *one.below):
            os.kill(pid, signal.SIGSTOP)
        kill_owner(one)
        assert one.all_of_it_ends()
        assert not one.folder.exists()


@AT_BOTH_ENDS
def test_everything_ends_with_an_owner_that_is_killed_while_its_call_runner_is_in_an_import(
    who: str, without: tuple[str, ...]
) -> None:
    with owner(who, without) as one:
        assert one.process.stdin is not None
        one.process.stdin.write("import\n")
        one.process.stdin.flush()
        until_exists(one.import_started)
        kill_owner(one)
        assert one.all_of_it_ends()
        assert not one.folder.exists()


@AT_BOTH_ENDS
def test_everything_ends_as_the_reaper_is_asked_to(who: str, without: tuple[str, ...]) -> None:
    with owner(who, without) as one:
        os.kill(one.reaper, signal.SIGTERM)
        assert one.all_of_it_ends()
        assert not one.folder.exists()


def test_all_calls_die_with_a_reaper_that_is_killed_and_the_next_sandbox_sweeps_their_folder() -> (
    None
):
    with owner("user") as one:
        os.kill(one.reaper, signal.SIGKILL)
        assert one.all_of_it_ends()
        kill_owner(one)
        assert one.folder.exists()
        environment = {**os.environ, "TMPDIR": str(one.folder.parent)}
        program = (
            "import asyncio\nfrom vla_rl.sandbox import Sandbox\nasync def main():\n"
            "    async with Sandbox() as sandbox:\n        await "
            "sandbox.run_program('')\nasyncio.run(main())"
        )
        subprocess.run(
            [sys.executable, "-c", program], env=environment, timeout=WITHIN_S, check=True
        )
        assert list(one.folder.parent.iterdir()) == []


def test_nothing_is_left_after_our_own_process_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom vla_rl.sandbox import *\nasync def main():\n    async with "
        "Sandbox() as sandbox:\n"
        "        task = asyncio.create_task(sandbox.run_program('import time; "
        "time.sleep(4321.5)', '', "
        "ProcessLimits(timeout_s=1000)))\n"
        "        while sandbox.runner_pid is None: await asyncio.sleep(0.01)\n"
        "        print(sandbox.runner_pid, flush=True)\n        await task\nasyncio.run(main())"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        runner = psutil.Process(int(process.stdout.readline()))
        assert list(tmp_path.iterdir())
        process.kill()
    psutil.wait_procs([runner], timeout=60)
    assert not runner.is_running()
    assert not list(tmp_path.iterdir())
