"""Attacks of a sandboxed call on the rest of the machine, and what came of them, seen from outside.

`python attacks.py <SandboxConfig as JSON>` makes a world outside, runs every attack as a program
and as a function, and prints one JSON object: whether each attack got through, what came of each
limit, and the means that were missing.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ATTACK = r"""
import ctypes, fcntl, json, os, signal, socket, sys

def attempt(function, *arguments, **options):
    try:
        return function(*arguments, **options)
    except (OSError, ValueError) as error:
        return str(error)

def connect(family, address):
    with socket.socket(family) as one:
        one.settimeout(5)
        one.connect(address)

def opened(path, flags):
    os.close(os.open(path, flags))
    return "opened"

def locked(path):
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    return "locked"

world = json.loads(sys.stdin.read()) if __name__ == "__main__" else WORLD
folder = world["folder"]
attempt(lambda: open(f"{folder}/checkpoint", "w").write("poisoned"))
attempt(os.remove, f"{folder}/removed")
attempt(os.rename, f"{folder}/moved", f"{folder}/stolen")
attempt(lambda: open(f"{folder}/new", "w"))
attempt(os.chmod, f"{folder}/mode", 0o600)
attempt(os.utime, f"{folder}/mode", (0, 0))
attempt(os.setxattr, f"{folder}/shared", "user.mark", b"left")
attempt(os.removexattr, f"{folder}/shared", "user.kept")
attempt(lambda: open(f"/dev/shm/{world['name']}", "w").write("left"))
attempt(os.kill, world["victim"], signal.SIGKILL)
attempt(connect, socket.AF_INET, ("127.0.0.1", world["port"]))
attempt(connect, socket.AF_UNIX, f"{folder}/socket")
attempt(connect, socket.AF_UNIX, "\0" + world["name"])
libc = ctypes.CDLL(None, use_errno=True)
libc.shmget(world["key"], 4096, 0o1666)
seen = {
    "core_pattern": attempt(opened, "/proc/sys/kernel/core_pattern", os.O_WRONLY),
    "kernel log": attempt(opened, "/dev/kmsg", os.O_WRONLY),
    "environment": attempt(lambda: open(f"/proc/{world['owner']}/environ").read()),
    "lock": attempt(locked, f"{folder}/checkpoint"),
    "memory file": attempt(lambda: os.close(os.memfd_create("hidden")) or "made"),
    "remounted": libc.mount(b"none", b"/", None, 0x20 | 0x1000, None) == 0,
}
print(json.dumps(seen))
"""

SHARED_KEY = 0x0BAD0000 + os.getpid() % 0xFFFF


def attack(world: dict[str, Any]) -> None:
    """The attack as a function."""
    exec(ATTACK, {"WORLD": world, "__name__": "function"})


MANY_FILES = """
for number in range(5):
    with open(f"part{number}", "wb") as file:
        for _ in range(20):
            file.write(bytes(1 << 20))
import time; time.sleep(600)
"""
REMOVED_FILES = """
import os
held = []
for number in range(5):
    held.append(open("part", "wb", buffering=0))
    os.remove("part")
    for _ in range(20):
        held[-1].write(bytes(1 << 20))
import time; time.sleep(600)
"""
SHARED_FILES = """
for number in range(5):
    with open(f"/dev/shm/part{number}", "wb") as file:
        for _ in range(20):
            file.write(bytes(1 << 20))
"""
MANY_PROCESSES = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"x") * (60 << 20)
        time.sleep(600)
time.sleep(600)
"""
SHARED_MEMORY = """
import mmap, os, time
for _ in range(4):
    if os.fork() == 0:
        held = mmap.mmap(-1, 60 << 20)
        for page in range(0, len(held), 4096):
            held[page] = 1
        time.sleep(600)
time.sleep(600)
"""
GREEDY = {
    "files": MANY_FILES,
    "removed files": REMOVED_FILES,
    "/dev/shm": SHARED_FILES,
    "memory": MANY_PROCESSES,
    "shared memory": SHARED_MEMORY,
}


@contextlib.contextmanager
def listening(family: int, address: Any) -> Iterator[socket.socket]:
    with socket.socket(family) as one:
        one.bind(address)
        one.listen()
        one.setblocking(False)
        yield one


def was_reached(one: socket.socket) -> bool:
    try:
        one.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def world_outside() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Make a world for one attack: what the attack knows of it, and a dictionary that holds what
    got through afterwards.

    Everything is as open as a careless user leaves it: every user may enter the folder.
    """
    got_through: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outside_")))
        folder.chmod(0o755)
        for name in ("checkpoint", "removed", "moved", "mode"):
            (folder / name).write_text("whole")
            (folder / name).chmod(0o644)
        (folder / "shared").write_text("whole")
        (folder / "shared").chmod(0o666)
        with contextlib.suppress(OSError):  # a file system without attributes
            os.setxattr(folder / "shared", "user.kept", b"whole")
        attributes = os.listxattr(folder / "shared")
        name = folder.name
        network = stack.enter_context(listening(socket.AF_INET, ("127.0.0.1", 0)))
        by_path = stack.enter_context(listening(socket.AF_UNIX, str(folder / "socket")))
        (folder / "socket").chmod(0o777)
        abstract = stack.enter_context(listening(socket.AF_UNIX, "\0" + name))
        victim = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(victim.kill)
        yield (
            {
                "folder": str(folder),
                "name": name,
                "owner": os.getpid(),
                "victim": victim.pid,
                "port": network.getsockname()[1],
                "key": SHARED_KEY,
            },
            got_through,
        )
        left = Path("/dev/shm", name)
        mode = (folder / "mode").stat()
        segment = subprocess.run(["ipcrm", "-M", str(SHARED_KEY)], capture_output=True, check=False)
        got_through |= {
            "write files outside of its folder": (folder / "checkpoint").read_text() != "whole"
            or (folder / "new").exists(),
            "remove or rename files outside": not (folder / "removed").exists()
            or not (folder / "moved").exists(),
            "change modes and times of files outside": mode.st_mode & 0o777 != 0o644
            or mode.st_mtime == 0,
            "set attributes of files that every user may write": attributes
            != os.listxattr(folder / "shared"),
            "leave files in /dev/shm": left.exists(),
            "leave System V memory behind": segment.returncode == 0,
            "end processes outside": victim.poll() == -signal.SIGKILL,
            "use the network": was_reached(network),
            "connect to a unix socket by its path": was_reached(by_path),
            "connect to an abstract unix socket": was_reached(abstract),
        }
        left.unlink(missing_ok=True)


async def run_all(options: dict[str, Any]) -> dict[str, Any]:
    """Every attack as a program and as a function; then every limit."""
    from vla_rl.sandbox import ProcessLimits, Sandbox, SandboxConfig

    offline = ProcessLimits(timeout_s=60.0, network=False)
    small = ProcessLimits(timeout_s=60.0, network=False, memory_mb=150, file_mb=60, disk_mb=48)
    found: dict[str, Any] = {}
    async with asyncio.timeout(250), Sandbox(SandboxConfig(**options)) as sandbox:
        for kind in ("program", "function"):
            with world_outside() as (world, got_through):
                if kind == "program":
                    result = await sandbox.run_program(ATTACK, json.dumps(world), offline)
                else:
                    result = await sandbox.call("attacks:attack", {"world": world}, offline)
            seen = json.loads(result.stdout) if result.fault is None else {}
            found[kind] = {
                **got_through,
                "error": result.text,
                "change kernel settings": seen.get("core_pattern") == "opened",
                "write to the kernel log": seen.get("kernel log") == "opened",
                "read our environment variables": "SECRET=token" in seen.get("environment", ""),
                "hold a lock on files outside until it ends": seen.get("lock") == "locked",
                "make memory that is no process's": seen.get("memory file") == "made",
                "make its files writable again": seen.get("remounted"),
                "is offline": result.is_offline,
            }
        without = options.get("without", ())
        # some would write outside
        for name, program in () if "landlock" in without else GREEDY.items():
            result = await sandbox.run_program(program, limits=small)
            found[name] = result.text
        found["missing"] = sandbox.missing
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run_all(json.loads(sys.argv[1])))))
