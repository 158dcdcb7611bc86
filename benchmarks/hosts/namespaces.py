"""Network namespaces of this machine that stand in for hosts: each has an address and a cable.

    with network_namespaces(2) as (near, far):
        server = far.popen([sys.executable, "-m", "vla_rl.actors.host", ...])
        with near.entered():          # sockets of this thread belong to `near` from here on
            ...
        far.pull_cable()

All are connected to a switch in a namespace of its own, so that several such networks exist beside
each other with the same addresses. A namespace has no name and no file: a descriptor of this
process holds it, and the kernel removes it, with its cable, after the last process in it has ended.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_CLONE_NEWNET = 0x40000000
_INTERFACE = "eth0"
_libc = ctypes.CDLL(None, use_errno=True)


class NamespacesRefused(RuntimeError):
    """This machine does not allow network namespaces; the message is the reason."""


class NamespaceHost:
    """One namespace.

    Attributes:
        address: its IPv4 address, `10.77.0.k`.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._fd = _new_namespace()
        self._inode = os.fstat(self._fd).st_ino
        self._started: list[subprocess.Popen[Any]] = []
        self._switch: tuple[NamespaceHost, str] | None = None

    @property
    def path(self) -> str:
        """Path of the namespace for `nsenter` and `ip`, while this process is alive."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a program in the namespace.

        It is killed with this process, or when the block of `network_namespaces` is left.

        Args:
            command: program and arguments.
            options: those of `subprocess.Popen`.
        """
        inside = ["nsenter", f"--net={self.path}", "--", "setpriv", "--pdeathsig", "KILL", "--"]
        # an owner that was killed before `setpriv` asked for the signal would never send it
        if_owned = ["sh", "-c", f'[ "$PPID" = {os.getpid()} ] && exec "$@"', "sh"]
        process = subprocess.Popen([*inside, *if_owned, *command], **options)
        self._started.append(process)
        return process

    def run(self, *command: str) -> str:
        """Run a program to its end in the namespace; return its output.

        Raises: NamespacesRefused with its words if it fails.
        """
        inside = ["nsenter", f"--net={self.path}", "--", *command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise NamespacesRefused(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread into the namespace while the block runs.

        What it starts meanwhile belongs there for good: sockets, threads (ZeroMQ's too), processes.
        """
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self._fd)
            yield
        finally:
            _enter(before)
            os.close(before)

    def pull_cable(self) -> None:
        """Cut the namespace off: packets are lost, and no connection is closed."""
        self.run("ip", "link", "set", _INTERFACE, "down")

    def plug_in_cable(self) -> None:
        """Connect the namespace again."""
        self.run("ip", "link", "set", _INTERFACE, "up")

    def limit_cable(self, mb_per_s: float) -> None:
        """Let the cable carry at most so much in each direction.

        Raises: NamespacesRefused if the kernel cannot; ValueError for the switch itself.
        """
        if self._switch is None:
            raise ValueError("the switch has no cable of its own; limit those of the hosts")
        switch, port = self._switch
        rate = ["rate", f"{round(8000 * mb_per_s)}kbit", "burst", "256kb", "latency", "100ms"]
        for end, device in ((self, _INTERFACE), (switch, port)):
            end.run("tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def carried_bytes(self) -> tuple[int, int]:
        """Return the bytes that its cable has carried so far: received and sent."""
        for line in self.run("cat", "/proc/net/dev").splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == _INTERFACE:
                counts = numbers.split()
                return int(counts[0]), int(counts[8])
        return 0, 0

    def processes(self) -> list[int]:
        """Return the processes in the namespace, also those that others started."""
        found = []
        for entry in Path("/proc").iterdir():
            # one that has ended, or ends as we look, is in no namespace
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "ns/net").stat().st_ino == self._inode:
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        """Kill the programs that `popen` started, and let go of the namespace."""
        for process in self._started:
            process.kill()
        for process in self._started:
            process.wait()
        os.close(self._fd)


@contextlib.contextmanager
def network_namespaces(number: int) -> Iterator[tuple[NamespaceHost, ...]]:
    """Make `number` namespaces with the addresses 10.77.0.1, 10.77.0.2, ..., connected by a switch.

    Raises: NamespacesRefused if the machine does not allow them.
    """
    for program in ("ip", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            raise NamespacesRefused(f"the program `{program}` is not installed")
    with contextlib.ExitStack() as open_ones:
        switch = NamespaceHost("")
        open_ones.callback(switch.close)
        switch.run("ip", "link", "add", "switch", "type", "bridge")
        switch.run("ip", "link", "set", "switch", "up")
        hosts = []
        for k in range(1, number + 1):
            host = NamespaceHost(f"10.77.0.{k}")
            open_ones.callback(host.close)
            _plug(host, switch, f"port{k}")
            hosts.append(host)
        yield tuple(hosts)


def _plug(host: NamespaceHost, switch: NamespaceHost, port: str) -> None:
    """Lay a cable from the host to a port of the switch."""
    cable = ["ip", "link", "add", port, "type", "veth"]
    switch.run(*cable, "peer", "name", _INTERFACE, "netns", host.path)
    switch.run("ip", "link", "set", port, "master", "switch", "up")
    host.run("ip", "address", "add", f"{host.address}/24", "dev", _INTERFACE)
    host.run("ip", "link", "set", "lo", "up")
    host.run("ip", "link", "set", _INTERFACE, "up")
    host._switch = switch, port


def _new_namespace() -> int:
    """Return a descriptor of a new namespace; the caller stays in its own."""
    made: list[int | OSError] = []

    def make() -> None:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            made.append(OSError(ctypes.get_errno(), "unshare"))
        else:
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))

    thread = threading.Thread(target=make, name="new network namespace")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        reason = os.strerror(made[0].errno or 0)
        raise NamespacesRefused(f"the kernel refuses a network namespace: {reason}")
    return made[0]


def _enter(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
