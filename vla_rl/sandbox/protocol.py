"""Messages between a sandbox and its keeper: msgpack in frames, over one socket."""

import struct
from typing import Any, Final, Literal, TypeAlias

import msgspec

from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.means import Means

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
    """The only argument of the started process, as JSON."""

    connection: int
    """Descriptor of the socket to the sandbox."""

    folder: str
    folder_lock: int
    """Descriptor that holds the lock of the folder."""

    owner_pid: int
    without: tuple[Means, ...]
    """Means of isolation not to use."""


class FunctionCall(msgspec.Struct, frozen=True, tag=True):
    """Call `module:function`."""

    id: int
    path: str
    arguments: dict[str, Any]
    limits: ProcessLimits
    is_converted: bool = False
    """Whether arguments are converted to the function's type hints."""


class ProgramCall(msgspec.Struct, frozen=True, tag=True):
    """Run Python source in a new interpreter, with a standard input."""

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
    """The keeper accepts calls."""

    pid: int
    open_to_calls: list[str]
    """Unwanted actions that calls can do, in words."""

    refused: dict[Means, str]
    """Means of isolation that are not available, each with the reason."""


class Imported(msgspec.Struct, frozen=True, tag=True):
    """An import is finished, and the keeper survived it."""

    module: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a call."""

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
    """The value or the error of a function."""

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
        while len(self._held) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._held)
            end = _LENGTH.size + length
            if len(self._held) < end:
                break
            whole.append(bytes(self._held[_LENGTH.size : end]))
            del self._held[:end]
        return whole
