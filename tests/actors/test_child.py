"""The process of an actor: its interpreter, its program, what it prints."""

import asyncio
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import vla_rl
from vla_rl.actors import ChildProcess, ForkServer, Runtime
from vla_rl.actors.processes.fork_servers import RUNTIME_PACKAGES, check_interpreter
from vla_rl.actors.processes.started_process import StderrTail
from vla_rl.errors import ConfigError

ENDING = """
import atexit, sys, threading, time
from vla_rl.actors.processes.child import end_process

class Freed:
    def __del__(self):
        print("freed", flush=True)

kept = Freed()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("last words", end=" ")
{before}
end_process(3)
"""


def ended(before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENDING.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_ending_process_waits_for_threads_and_exit_functions_and_frees_nothing() -> None:
    found = ended()
    assert (found.returncode, found.stderr) == (3, "")
    assert found.stdout == "last words thread\nat exit\n"


@pytest.mark.parametrize("before", ["sys.stdout = None", "sys.stderr.close()"])
def test_a_stream_that_is_gone_does_not_keep_a_process_from_its_end(before: str) -> None:
    assert ended(before).returncode == 3


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
    assert tail.lines == ("one", "two", "unfinished")


async def test_only_the_last_twenty_lines_are_kept(pipe: tuple[int, int]) -> None:
    tail = StderrTail(pipe[0], "env-3")
    os.write(pipe[1], b"".join(b"%d\n" % number for number in range(30)))
    tail.close()
    assert tail.lines == tuple(str(number) for number in range(10, 30))


async def test_a_line_without_end_is_cut(pipe: tuple[int, int]) -> None:
    tail = StderrTail(pipe[0], "env-3")
    os.write(pipe[1], b"x" * 5000)
    tail.close()
    assert {len(line) for line in tail.lines} == {2000}


async def test_the_rest_is_read_without_waiting_for_who_still_holds_the_pipe(
    pipe: tuple[int, int],
) -> None:
    tail = StderrTail(pipe[0], "env-3")
    tail.close()
    tail.close()
    with pytest.raises(BrokenPipeError):
        os.write(pipe[1], b"nobody reads")


MakePython = Callable[..., str]
SIBLINGS = {"numpy": ("numpy.libs",), "zmq": ("pyzmq.libs",), "vla_rl": ()}
"""Folders that a package brings beside its own."""


@pytest.fixture(autouse=True)
def _only_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter would find this checkout by a PYTHONPATH that names it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(autouse=True)
def _modules_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another interpreter finds none through this one's PYTHONPATH."""
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture(scope="module")
def make_python(tmp_path_factory: pytest.TempPathFactory) -> MakePython:
    """An interpreter of its own virtual environment that has only these packages, linked instead of
    installed.
    """

    def make(packages: Sequence[str]) -> str:
        folder = tmp_path_factory.mktemp("venv")
        venv.create(folder, symlinks=True)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        for package in packages:
            spec = importlib.util.find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            home = (
                Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            )
            for found in (home, *(home.parent / name for name in SIBLINGS.get(package, ()))):
                if found.exists():
                    (site_packages / found.name).symlink_to(found)
        return str(folder / "bin" / "python")

    return make


async def test_an_actor_runs_in_another_interpreter_that_has_vla_rl_and_the_runtime_packages(
    make_python: MakePython,
) -> None:
    from sample_actors import Counter

    python = make_python(["vla_rl", *RUNTIME_PACKAGES])
    support = str(Path(__file__).parent / "support")
    for server in (None, ForkServer(env={"PYTHONPATH": support})):
        placement = ChildProcess(python=python, env={"PYTHONPATH": support}, fork_from=server)
        async with asyncio.timeout(60), Runtime() as runtime:
            counter = await runtime.spawn(Counter, 3, placement=placement)
            assert await counter.add(2) == 5
            assert command_line(runtime.info(counter).pid).startswith(python)


async def test_what_an_interpreter_lacks_is_named_with_the_command_that_installs_it(
    make_python: MakePython,
) -> None:
    from sample_actors import Counter

    python = make_python(["vla_rl", "numpy", "uvloop"])
    async with asyncio.timeout(60), Runtime() as runtime:
        with pytest.raises(ConfigError) as raised:
            await runtime.spawn(Counter, placement=ChildProcess(python=python))
    assert str(raised.value) == (
        f"python is {python!r}, which lacks msgspec, pyzmq; run `{shlex.quote(python)} -m "
        "pip install msgspec pyzmq`."
    )


async def test_without_vla_rl_it_is_to_be_installed_without_what_it_needs_for_training(
    make_python: MakePython,
) -> None:
    python = make_python(list(RUNTIME_PACKAGES))
    install = f"{shlex.quote(python)} -m pip install --no-deps "
    checkout = shlex.quote(str(Path(vla_rl.__file__).parent.parent))
    with pytest.raises(ConfigError, match=re.escape(f"lacks vla_rl; run `{install}{checkout}`")):
        await check_interpreter(python)


async def test_another_version_of_vla_rl_is_refused(
    make_python: MakePython, tmp_path: Path
) -> None:
    python = make_python(list(RUNTIME_PACKAGES))
    (site_packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (site_packages / "vla_rl").mkdir()
    (site_packages / "vla_rl" / "__init__.py").write_text('__version__ = "0.0.1"\n')
    with pytest.raises(
        ConfigError, match=rf"vla_rl {vla_rl.__version__} \(it has 0\.0\.1\).*--force-reinstall"
    ):
        await check_interpreter(python)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (None, "is not an executable file; expected the path of an interpreter"),
        ("echo hello", r"does not behave as a Python interpreter \(exit code 0"),
        (
            "echo no such library >&2; exit 127",
            r"does not behave as a Python interpreter \(exit code 127: no such",
        ),
        ("echo '[[3, 8], [], null]'", r"which is Python 3\.8, expected 3\.11 or newer"),
    ],
)
async def test_a_python_that_will_not_do_is_refused_with_the_reason(
    tmp_path: Path, script: str | None, reason: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    with pytest.raises(ConfigError, match=reason):
        await check_interpreter(str(python))


async def test_what_was_missing_is_asked_for_again_once_it_is_installed(
    make_python: MakePython,
) -> None:
    python = make_python(["vla_rl", "msgspec", "numpy", "uvloop"])
    with pytest.raises(ConfigError, match="lacks pyzmq"):
        await check_interpreter(python)
    (site_packages,) = Path(python).parents[1].glob("lib/python*/site-packages")
    spec = importlib.util.find_spec("zmq")
    assert spec is not None
    assert spec.origin is not None
    os.symlink(Path(spec.origin).parent, site_packages / "zmq")
    await check_interpreter(python)


async def test_this_interpreter_will_do() -> None:
    await check_interpreter(sys.executable)


def command_line(pid: int) -> str:
    """How a process was started; a forked one, its server."""
    return Path(f"/proc/{pid}/cmdline").read_text()
