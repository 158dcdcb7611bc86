"""Messages between a sandbox and its call runner: msgpack in frames, over one socket.

A call comes with its limits. The means of isolation, by name:

namespaces   its own processes, System V memory and network; all its processes die with the first
mounts       all files read-only except its folder and /dev/shm, which are in memory and limited in
             size
own_user     if root runs it: a user of its own
landlock     it writes only in its folder, and signals only its own processes
seccomp      no sockets without a network; no memory and no objects outside of its processes; no
             extended attributes
"""

import math
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

import msgspec

from vla_rl.types import FINITE, Config, PositiveInt


class ProcessLimits(Config, frozen=True, kw_only=True):
    """Limits of one call. A call that exceeds one is killed with every process that it started."""

    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=FINITE)] = 10.0
    """Most seconds of wall-clock time from the start of the call."""

    cpu_s: PositiveInt | None = None
    """Most seconds of CPU time of each process. None: what one thread can use in `timeout_s`, and a
    second more, so that `timeout_s` ends a busy loop first."""

    memory_mb: PositiveInt = 2048
    """Most memory of all its processes together, and address space of each, in MiB, beyond that of
    the function's process when it is forked. Memory is summed ten times a second, so a call can
    exceed the limit for a moment."""

    file_mb: PositiveInt = 64
    """Largest size of each file that it writes, in MiB."""

    disk_mb: PositiveInt = 256
    """Largest size of all its files together, with /dev/shm, in MiB. If it has mounts of its own,
    the files are in memory, and a write beyond the limit fails with "No space left on device"; if
    not, the call is killed."""

    output_kb: PositiveInt = 1024
    """Largest size of its output, and of its returned value, in KiB each. Output up to the limit is
    kept."""

    max_processes: PositiveInt = 16
    """Most processes that it may have at a time, with its own."""

    network: bool = True
    """False blocks the network and all unix sockets, if the kernel can; `CallResult.is_offline`
    reports whether it did."""

    @property
    def most_cpu_s(self) -> int:
        """`cpu_s`, or the value that None stands for."""
        return math.ceil(self.timeout_s) + 1 if self.cpu_s is None else self.cpu_s


Means: TypeAlias = Literal["namespaces", "mounts", "own_user", "landlock", "seccomp"]

ALL_MEANS: Final[frozenset[Means]] = frozenset(get_args(Means))


def usable_means(*, is_root: bool, without: tuple[Means, ...]) -> frozenset[Means]:
    """Return the means to try.

    Mounts need namespaces, and only root can give a call a user of its own.
    """
    means = ALL_MEANS.difference(without, () if is_root else ("own_user",))
    return means if "namespaces" in means else means - {"mounts"}


def find_exposures(means: frozenset[Means], *, signals_are_confined: bool) -> list[str]:
    """List in words the unwanted actions that calls can do with these means.

    Args:
        means: the means that are used.
        signals_are_confined: whether this kernel's Landlock keeps signals inside.
    """
    found = []
    if means.isdisjoint(("mounts", "own_user", "landlock")):
        found.append("write wherever this user can")
    elif means.isdisjoint(("mounts", "own_user")):
        found.append("change modes and times of this user's files")
    elif means.isdisjoint(("mounts", "landlock")):
        found.append("write what every user can, such as new files in /tmp")
    elif means.isdisjoint(("own_user", "landlock")):
        found.append("write to devices that this user can write to")
    if means.isdisjoint(("mounts", "seccomp")) and means & {"own_user", "landlock"}:
        found.append("set attributes of files that every user can write to")
    if means.isdisjoint(("mounts", "landlock")):
        found.append("fill the disk outside of their folders")
    if means.isdisjoint(("namespaces", "own_user")) and not (
        "landlock" in means and signals_are_confined
    ):
        found.append("end this user's processes")
    if means.isdisjoint(("namespaces", "seccomp")):
        found.append("use the network, also with network=False")
    elif "seccomp" not in means:
        found.append(
            "connect to unix sockets, also with network=False, and keep memory that is not counted"
        )
    return found


def describe_missing(missing: Mapping[Means, str], found: list[str]) -> str:
    """Describe in one line the missing means and their consequences.

    Args:
        missing: means that are not used, each with the reason.
        found: actions that calls can do therefore.
    """
    reasons = ", ".join(f"{means} ({reason})" for means, reason in missing.items())
    if not found:
        return (
            f"sandboxed calls are isolated without {reasons}; the other means keep the same "
            "promises"
        )
    return (
        f"sandboxed calls can {'; '.join(found)}, as they are isolated without {reasons}. Time, "
        "memory, output and the number of processes are limited all the same, and no process "
        "outlives its call"
    )


Fault: TypeAlias = Literal[
    "raised",
    "timed_out",
    "died",
    "printed_too_much",
    "too_many_processes",
    "too_much_memory",
    "too_much_disk",
    "not_isolated",
]

_LENGTH: Final = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True):
    """The only argument of the started process, as JSON.

    Example:
        Start(connection=9, folder="/tmp/vla_rl_sandbox.k3j2", folder_lock=7, owner_pid=4711, without=())
    """

    connection: int
    """Descriptor of the socket to the sandbox."""

    folder: str
    folder_lock: int
    """Descriptor that holds the lock of the folder."""

    owner_pid: int
    without: tuple[Means, ...]
    """Means of isolation not to use."""


class FunctionCall(msgspec.Struct, frozen=True, tag=True):
    """Call `module:function`.

    Example:
        FunctionCall(id=3, path="my_tools:add", arguments={"left": 1, "right": 2}, limits=ProcessLimits())
    """

    id: int
    path: str
    arguments: dict[str, Any]
    limits: ProcessLimits
    is_converted: bool = False
    """Whether arguments are converted to the function's type hints."""


class ProgramCall(msgspec.Struct, frozen=True, tag=True):
    """Run Python source in a new interpreter, with a standard input.

    Example:
        ProgramCall(id=4, source="print(input())", stdin="4", limits=ProcessLimits(network=False))
    """

    id: int
    source: str
    stdin: str
    limits: ProcessLimits


class Import(msgspec.Struct, frozen=True, tag=True):
    """Import a module before the next fork, so that calls need not import it."""

    module: str


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Kill a call whose caller no longer waits."""

    id: int


Request: TypeAlias = FunctionCall | ProgramCall | Import | Cancel


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The call runner accepts calls.

    Example:
        Ready(pid=4713, open_to_calls=["write wherever this user can"],
              refused={"mounts": "Operation not permitted", "landlock": "Function not implemented"})
    """

    pid: int
    open_to_calls: list[str]
    """Unwanted actions that calls can do, in words."""

    refused: dict[Means, str]
    """Means of isolation that are not available, each with the reason."""


class Imported(msgspec.Struct, frozen=True, tag=True):
    """An import is finished, and the call runner survived it."""

    module: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a call.

    Example:
        Ended(id=3, fault=None, words="", returned=b"...", stdout=b"", stderr=b"", is_offline=False,
              duration_s=0.013)
    """

    id: int
    fault: Fault | None
    words: str
    """The reason of the fault, in words."""

    returned: bytes = b""
    """The function's answer, an encoded `Returned`; empty if there is none."""

    stdout: bytes
    stderr: bytes
    is_offline: bool
    duration_s: float = 0.0


Answer: TypeAlias = Ready | Imported | Ended


class Returned(msgspec.Struct, frozen=True, array_like=True):
    """The value or the error of a function.

    Example:
        Returned(value=3)
        Returned(error="ZeroDivisionError: division by zero")
    """

    value: Any = None
    error: str | None = None


def frame(message: Any) -> bytes:
    """Encode a message, with its length before it."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Unframer:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that are complete now."""
        self._held += data
        whole = []
        # A stream has no messages: one read may bring half of one or three.
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            whole.append(bytes(self._held[_LENGTH.size : end]))
            del self._held[:end]
        return whole
