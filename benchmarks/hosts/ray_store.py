"""CPU time of Ray's object store between two nodes, each of them in a namespace of its own."""

import os
import secrets
import select
import subprocess
import time
from pathlib import Path
from typing import Final

import psutil

from benchmarks.hosts.namespaces import NamespaceHost

_PORT: Final = 6390
_STORE_BYTES: Final = 400_000_000
_WITHIN_S: Final = 150.0
_IDLE_S: Final = 4.0
_IN_FLIGHT: Final = 4
_GB: Final = 1e9


class NoRay(RuntimeError):
    """Ray cannot be measured; the message is the reason."""


def ray_cpu_s_per_gb(
    python: Path, near: NamespaceHost, remote: NamespaceHost, num_bytes: int, messages: int
) -> tuple[float, float]:
    """Return the CPU seconds of all of Ray's processes per GB, and the MB/s.

    The arrays are results of an actor on the other node, four calls at a time. What the processes
    use while they are idle is subtracted.

    Raises: NoRay if the interpreter has none, or its nodes do not start in time.
    """
    program = python.parent / "ray"
    if not program.exists():
        raise NoRay(f"{program} does not exist; install ray into the environment of {python}")
    node = [str(program), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    node.append(f"--object-store-memory={_STORE_BYTES}")
    address = f"{near.address}:{_PORT}"
    head = [*node, "--head", f"--port={_PORT}", "--include-dashboard=false"]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = {**os.environ, **token}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env}
    near.popen([*head, f"--node-ip-address={near.address}"], **quiet)
    other = [
        f"--address={address}",
        f"--node-ip-address={remote.address}",
        '--resources={"far": 1}',
    ]
    _until_open(near)
    remote.popen([*node, *other], **quiet)
    script = Path(__file__).with_name("ray_driver.py")
    command = [str(python), str(script), address, near.address, str(num_bytes), str(_IN_FLIGHT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    driver = near.popen(command, **{**quiet, **pipes})
    try:
        _read_line(driver)
        _receive(driver, messages // 4)
        idle_s = _cpu_s(near, remote)
        time.sleep(_IDLE_S)
        idle_per_s = (_cpu_s(near, remote) - idle_s) / _IDLE_S
        began, cpu_began_s = time.perf_counter(), _cpu_s(near, remote)
        _receive(driver, messages)
        elapsed_s = time.perf_counter() - began
        used_s = _cpu_s(near, remote) - cpu_began_s - idle_per_s * elapsed_s
        gigabytes = messages * num_bytes / _GB
        return used_s / gigabytes, 1000 * gigabytes / elapsed_s
    finally:
        _end_all(near, remote)


def _until_open(host: NamespaceHost) -> None:
    """Wait until the head listens."""
    until = time.monotonic() + _WITHIN_S
    while f":{_PORT:04X} " not in host.run("cat", "/proc/net/tcp", "/proc/net/tcp6"):
        if time.monotonic() > until:
            raise NoRay(f"Ray's head does not listen after {_WITHIN_S:g} s")
        time.sleep(0.2)


def _receive(driver: "subprocess.Popen[bytes]", messages: int) -> None:
    assert driver.stdin is not None
    driver.stdin.write(f"{messages}\n".encode())
    driver.stdin.flush()
    _read_line(driver)


def _read_line(driver: "subprocess.Popen[bytes]") -> None:
    assert driver.stdout is not None
    if not select.select([driver.stdout], [], [], _WITHIN_S)[0] or not driver.stdout.readline():
        raise NoRay(f"Ray's driver ended, or did not answer within {_WITHIN_S:g} s")


def _processes(*hosts: NamespaceHost) -> list[psutil.Process]:
    inside = {os.stat(host.path).st_ino for host in hosts}
    found = []
    for process in psutil.process_iter():
        try:
            if os.stat(f"/proc/{process.pid}/ns/net").st_ino in inside:
                found.append(process)
        except OSError:  # it has ended
            continue
    return [process for process in found if process.pid != os.getpid()]


def _cpu_s(*hosts: NamespaceHost) -> float:
    total = 0.0
    for process in _processes(*hosts):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _end_all(*hosts: NamespaceHost) -> None:
    """Kill every process in the namespaces: Ray's own ones outlive the programs that we started."""
    for process in _processes(*hosts):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
