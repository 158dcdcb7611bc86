"""The preparation of a placement before its first process: its interpreter, its fork server.

Another interpreter is checked once, whether it can run actors. A fork server is started with the first
child that names it; it is replaced when it dies.
"""

import asyncio
import functools
import json
import os
import shlex
from pathlib import Path
from typing import Self

import msgspec

import vla_rl
from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.processes.fork_server_process import ForkServerProcess
from vla_rl.actors.processes.liveness import ProcessObserver
from vla_rl.actors.processes.started_process import SpawnedProcess, StartProcess
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.util.processes import inherited_environment

RUNTIME_PACKAGES = {"msgspec": "msgspec", "numpy": "numpy", "uvloop": "uvloop", "zmq": "pyzmq"}
"""Packages that an actor's process imports besides vla_rl: import names and install names."""

_OLDEST = (3, 11)
_ANSWER_WITHIN_S = 60.0
_PROBE = """
import json, sys
sys.path[:] = [folder for folder in sys.path if folder]  # as an actor's process has it, which does not look around
from importlib.util import find_spec
missing = [name for name in {packages!r} if find_spec(name) is None]
own = None
if find_spec("vla_rl") is not None:
    import vla_rl
    own = vla_rl.__version__
print(json.dumps([sys.version_info[:2], missing, own]))
"""


async def check_interpreter(python: str, packages: dict[str, str] | None = None) -> None:
    """Raise ConfigError with the problem and its remedy, unless actors can run there.

    Args:
        python: path of the interpreter.
        packages: needed besides `RUNTIME_PACKAGES`; import names and install names.
    """
    needed = {**RUNTIME_PACKAGES, **(packages or {})}
    found, missing, own = await _probe_interpreter(python, tuple(needed))
    if tuple(found) < _OLDEST:
        raise ConfigError(
            f"python is {python!r}, which is Python {_format_version(found)}, expected {_format_version(_OLDEST)} "
            "or newer; create the virtual environment with a newer one."
        )
    faults, installs = [], []
    if own is None:
        faults.append("vla_rl")
        installs.append(f"--no-deps {_find_source()}")
    elif own != vla_rl.__version__:
        faults.append(f"vla_rl {vla_rl.__version__} (it has {own})")
        installs.append(f"--no-deps --force-reinstall {_find_source()}")
    if missing:
        names = [needed[name] for name in missing]
        faults += names
        installs.append(" ".join(names))
    if faults:
        commands = " && ".join(f"{shlex.quote(python)} -m pip install {what}" for what in installs)
        raise ConfigError(
            f"python is {python!r}, which lacks {', '.join(faults)}; run `{commands}`."
        )


async def _probe_interpreter(
    python: str, packages: tuple[str, ...]
) -> tuple[list[int], list[str], str | None]:
    """Return the version, the missing packages and the version of vla_rl there.

    Each file is asked once.
    """
    key, known = (python, packages, _identify(python)), _get_answers()
    # missing packages may be installed by now
    if key not in known or known[key][1] or known[key][2] is None:
        known[key] = await _ask_interpreter(python, packages)
    return known[key]


def _identify(python: str) -> tuple[int, int]:
    """Return numbers that tell this file from another one under the same path."""
    path = Path(python)
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(
            f"python is {python!r}, which is not an executable file; expected the path of an "
            "interpreter."
        )
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


@functools.cache
def _get_answers() -> dict[tuple[object, ...], tuple[list[int], list[str], str | None]]:
    """Return the cache of all interpreters' answers."""
    return {}


async def _ask_interpreter(
    python: str, packages: tuple[str, ...]
) -> tuple[list[int], list[str], str | None]:
    process = await asyncio.create_subprocess_exec(
        python,
        "-c",
        _PROBE.format(packages=packages),
        env=inherited_environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        raise ConfigError(
            f"python is {python!r}, which did not answer within {_ANSWER_WITHIN_S:g} s."
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found, missing, own = json.loads(out)
    except ValueError:
        words = err.decode(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
        raise ConfigError(
            f"python is {python!r}, which does not behave as a Python interpreter (exit code "
            f"{process.returncode}: "
            f"{words[0]}); expected the path of one."
        ) from None
    return found, missing, own


def _format_version(numbers: "tuple[int, ...] | list[int]") -> str:
    return ".".join(map(str, numbers))


def _find_source() -> str:
    """Return the argument of `pip install` for this vla_rl: its checkout, or its version."""
    from importlib.metadata import version  # here: each process of a run would wait for its import

    checkout = Path(vla_rl.__file__).parent.parent
    return (
        shlex.quote(str(checkout))
        if (checkout / "pyproject.toml").is_file()
        else f"vla_rl=={version('vla_rl')}"
    )


class ForkServers:
    """One server for each interpreter and preparation."""

    def __init__(self, name: str, observer: ProcessObserver) -> None:
        self._name, self._observer = name, observer
        self._servers: dict[bytes, ForkServerProcess] = {}
        self._is_closed = False

    def get_server(self, placement: ChildProcess) -> ForkServerProcess:
        """Return the server of this placement; start one if none is running.

        Raises: OSError if it cannot be started; ActorDied after `close`.
        """
        assert placement.fork_from is not None
        name = f"fork server of {self._name}"
        if self._is_closed:  # a spawn that began before `close` arrives here
            raise ActorDied(name, 0, "not started, since its runtime or its servers were closed")
        key = msgspec.json.encode((placement.python, placement.fork_from), order="deterministic")
        server = self._servers.get(key)
        if server is None or not server.is_alive():
            server = self._servers[key] = ForkServerProcess(name, placement, self._observer)
        return server

    async def prepare(self, placement: ChildProcess) -> None:
        """Check the interpreter of a placement, and wait until its server is ready.

        Raises: ConfigError for an unusable interpreter; what a prepare hook raises; ActorFrozen
            naming a hook that did not end in time; ActorDied if the server dies.
        """
        if placement.python is not None:
            await check_interpreter(placement.python)
        if placement.fork_from is not None:
            await self.get_server(placement).until_ready()

    def get_starter(self, placement: ChildProcess) -> StartProcess:
        """Return what starts such a process: a fork of its server, or a fresh interpreter."""
        return (
            self.get_server(placement).fork_child
            if placement.fork_from is not None
            else SpawnedProcess
        )

    async def close(self) -> None:
        """End all servers and start no more. Their children have ended before."""
        self._is_closed = True
        for server in self._servers.values():
            server.close()
        try:
            await asyncio.gather(*(server.wait_until_gone() for server in self._servers.values()))
        except BaseException:  # a second cancellation: no time is left
            for server in self._servers.values():
                server.kill_server()
            raise


class LastingForkServers(ForkServers):
    """Fork servers that outlive the runtimes that are given them, so that the next one need not wait
    for its imports and hooks again.

    `async with LastingForkServers(name) as servers:` ends them on the way out.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, ProcessObserver(name))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            self._observer.close()
