"""A run and its terminal: signals stop it in order, no output ends it, errors are reported as one."""

import ast
import asyncio
import errno
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from vla_rl.cli.main import COMMANDS, RECIPES
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.run.terminal import StopSignal, explain, lasting_output, only_error, raises_one_error
from vla_rl.util.tasks import finish_despite_cancellation


@pytest.fixture(autouse=True)
def terminal_signal() -> Iterator[None]:
    """Set SIGHUP as a terminal leaves it, however these tests are run, and put it back."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_work_that_ends_by_itself_is_just_awaited() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("worked")

    with StopSignal() as stop:
        await stop.unless_asked(work())
    assert done == ["worked"]
    assert not stop.is_asked


async def test_asked_to_stop_the_work_is_cancelled_and_its_clean_up_awaited() -> None:
    story: list[str] = []

    async def work(stop: StopSignal) -> None:
        try:
            stop.ask_to_stop()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            story.append("cleaned up")

    async with asyncio.timeout(5):
        with StopSignal() as stop:
            await stop.unless_asked(work(stop))
    assert story == ["cleaned up"]


async def test_a_signal_is_answered_with_what_stopping_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for then in ("saving a checkpoint", "losing the running episodes"):
        async with asyncio.timeout(5):
            with StopSignal(then) as stop:
                os.kill(os.getpid(), signal.SIGINT)
                await stop.unless_asked(asyncio.Event().wait())  # type: ignore[arg-type]
        assert (
            capsys.readouterr().err == f"SIGINT: stopping in order and {then}; once more stops "
            "at once\n"
        )


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
async def test_a_signal_that_stops_in_order_is_the_exit_status(
    number: signal.Signals, status: int
) -> None:
    async with asyncio.timeout(5):
        with StopSignal() as stop:
            assert stop.exit_status == 0
            os.kill(os.getpid(), number)
            await stop.unless_asked(asyncio.Event().wait())  # type: ignore[arg-type]
    assert (stop.received, stop.exit_status) == (number, status)


async def test_a_terminal_that_closes_twice_and_a_sigterm_behind_it_leave_time_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closing terminal sends SIGHUP by the kernel and by the shell.

    A log-out sends SIGTERM as well.
    """
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with StopSignal() as stop:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            stop._received(number)
        assert ended == []
        assert stop.received is signal.SIGHUP
        stop._received(signal.SIGINT)
    assert ended == [130]
    # what is written after the save is written too
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_a_run_under_nohup_does_not_hear_the_terminal_close() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    async with asyncio.timeout(5):
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGINT)
            await stop.unless_asked(asyncio.Event().wait())  # type: ignore[arg-type]
    assert stop.received is signal.SIGINT
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_a_terminal_that_is_gone_does_not_keep_a_run_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", gone)
        async with asyncio.timeout(5):
            with StopSignal() as stop:
                os.kill(os.getpid(), signal.SIGTERM)
                await stop.unless_asked(asyncio.Event().wait())  # type: ignore[arg-type]
        assert stop.is_asked
        gone.buffer.raw.close()  # type: ignore[attr-defined]


async def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    async def work() -> None:
        raise RuntimeError("broken")

    with StopSignal() as stop, pytest.raises(RuntimeError, match="broken"):
        await stop.unless_asked(work())


async def test_what_is_carried_through_ends_before_its_caller_is_cancelled() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def update() -> int:
        started.set()
        await go_on.wait()
        return 7

    async with asyncio.timeout(5):
        caller = asyncio.create_task(finish_despite_cancellation(update()))
        await started.wait()
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        go_on.set()
        assert await caller == (7, True)


async def test_an_error_of_what_is_carried_through_reaches_the_caller() -> None:
    async def update() -> int:
        raise FloatingPointError("not finite")

    with pytest.raises(FloatingPointError, match="not finite"):
        await finish_despite_cancellation(update())


def test_outside_of_the_main_thread_no_signal_is_listened_to_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended: list[str] = []

    async def work() -> None:
        ended.append("worked")

    async def main() -> None:
        with StopSignal() as stop:
            await stop.unless_asked(work())
        assert stop.exit_status == 0

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(10)
    assert ended == ["worked"]
    said = capsys.readouterr().err
    assert said.startswith("this run is not in the main thread, so that no signal reaches it")
    assert said.count("\n") == 1


MAIN_THREAD_ALONE = {
    "envs/bench2drive/carla_side/vla_rl_route_server.py": "a program on the machine with CARLA",
    "actors/host.py": "`vla-rl host`, a process of its own",
    "util/processes.py": "the first lines of a child process",
    "sandbox/child.py": "the first lines of a sandboxed call's process",
    "sandbox/reaper.py": "the sandbox's own process",
    "run/terminal.py": "asks which thread it is in",
}
"""Modules that call what works in the main thread alone, and why they may."""

OF_MAIN_THREAD = re.compile(
    r"add_signal_handler\(|signal\.signal\(|set_wakeup_fd\(|setitimer\(|faulthandler\.(enable|register)"
)


def test_what_needs_the_main_thread_is_listed() -> None:
    package = Path(__file__).parents[2] / "vla_rl"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if OF_MAIN_THREAD.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(MAIN_THREAD_ALONE)


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
        from vla_rl.run.terminal import lasting_output
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


def test_letters_that_the_output_cannot_encode_are_escaped() -> None:
    program = """
        import sys
        from rich.console import Console
        from rich.table import Table
        from vla_rl.run.terminal import lasting_output
        with lasting_output():
            print("pr\\xfcfung", flush=True)
            sys.stdout.writelines(["\\u4e0a\\n"])
            table = Table("task")
            table.add_row("pr\\xfcfung \\u2713")
            Console(width=40).print(table)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    first, second, *table = done.stdout.decode("ascii").splitlines()
    assert (first, second) == (r"pr\xfcfung", r"\u4e0a")
    assert any(r"pr\xfcfung \u2713" in line for line in table)


MAINS = {
    "vla_rl.cli.main": "main",
    **dict.fromkeys(COMMANDS.values(), "main"),
    "vla_rl.cli.launch": "run_recipe",
    "vla_rl.recipes.record_demonstrations": "cli",
    "vla_rl.run.train": "train",
    "vla_rl.run.training_run": "execute",
    "vla_rl.run.supervised": "train_supervised",
}
"""Functions that print for a whole command or run, by module."""


@pytest.mark.parametrize("module", MAINS)
def test_each_command_and_run_prints_to_lasting_output(module: str) -> None:
    found = find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        found = find_spec(f"{module}.__main__")
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).read_text())
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == MAINS[module]
    ]
    # a command with a recipe's options runs as recipes do, which the next test holds
    runs_as_recipe = f"{MAINS[module]} = partial(run_recipe" in ast.unparse(tree)
    assert runs_as_recipe or any(
        "lasting_output()" in ast.unparse(function) for function in functions
    )


def test_each_recipe_runs_by_a_function_that_prints_to_lasting_output() -> None:
    recipes = [path for path in RECIPES.glob("*.py") if "__main__" in path.read_text()]
    others = [
        path.stem
        for path in recipes
        if "run_recipe" not in path.read_text() and "lasting_output()" not in path.read_text()
    ]
    assert others == []


def test_equal_errors_of_nested_groups_are_one_and_counted() -> None:
    group = ExceptionGroup(
        "outer", [ValueError("same"), ExceptionGroup("inner", [ValueError("same")])]
    )
    error = only_error(group)
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["1 more task failed in the same way"]


def test_different_errors_stay_together() -> None:
    group = ExceptionGroup("outer", [ValueError("one"), ValueError("two")])
    assert only_error(group) is group


def test_notes_of_a_group_are_kept() -> None:
    group = ExceptionGroup("outer", [ValueError("one")])
    group.add_note("the progress was saved")
    assert only_error(group).__notes__ == ["the progress was saved"]


async def test_a_decorated_run_raises_the_error_itself() -> None:
    @raises_one_error
    async def run() -> None:
        raise ExceptionGroup("tasks", [ConfigError("wrong")])

    with pytest.raises(ConfigError, match="wrong"):
        await run()


def test_our_errors_are_explained_by_their_words_and_cause() -> None:
    error = CheckpointError("it is damaged")
    error.add_note("a note")
    error.__cause__ = OSError("no such file")
    assert explain(error).splitlines() == [
        "error: CheckpointError: it is damaged",
        "a note",
        "because of: OSError: no such file",
    ]


def test_a_bug_is_explained_by_its_traceback() -> None:
    assert explain(KeyError("x")) == "KeyError: 'x'"
