"""The envelope of each message: 18 bytes in front of a msgpack payload, in the first frame.

Arrays may follow as frames.

    magic u8 | kind u8 | method u16 | frames u16 | actor u32 | call u64        little endian

`frames` is the number of frames that follow; a reader takes no more from the socket, which saves a
query. `actor` distinguishes the actors behind one host; on this host it is 0. `method` is an index
into the actor's table. For CREDIT it is the number of items granted.

Frames of `PART_BYTES` or more are sent in parts of that size. ZeroMQ allocates the announced size of a
frame before it knows the peer, so its limit on the frame size bounds the memory that an unknown
connection may take. A part of exactly `PART_BYTES` is continued by the next frame; a shorter one, which
may be empty, is the last.

Small messages that are queued at the same moment are sent as one BATCH: each is preceded by its
length as u32. A batch holds at most `MOST_IN_BATCH` messages of less than `BATCHED_BELOW` bytes; a
reader rejects anything else, since splitting costs it far more than the bytes cost the sender.
"""

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec

from vla_rl.actors.placement import ChildProcess, KeyPair, Takeover

MAGIC = 0xA7
ENVELOPE = struct.Struct("<BBHHIQ")
ENVELOPE_SIZE = ENVELOPE.size
MAX_FRAMES = 0xFFFF
OWN_CALL = 0
"""Call number of an actor's own messages: about its start and its end."""
MAX_MESSAGE_BYTES = 1 << 30
"""Largest array, and largest payload without its arrays (bytes); a sender refuses to send more."""
_NUM_FRAMES = struct.Struct("<H")

Frames: TypeAlias = Sequence[Any]
"""Bytes-like objects; the first one begins with the envelope."""


class MalformedMessage(ValueError):
    """Bytes that are not one of our messages. The receiver counts it and continues."""


class Kind(enum.IntEnum):
    """Kind of a message; the first group goes to an actor, the second comes from one.

    LOST and NEXT_CLIENT go from a host to its own process: its client is lost, and the next one has come.
    RECEIVED goes either way: its `call` is a number of bytes that have arrived.
    """

    SPAWN = 1
    CALL = 2
    CREDIT = 3
    CANCEL = 4
    STOP = 5
    KILL = 6
    LAG = 7
    LAUNCH = 8
    PREPARE = 9
    LOST = 10
    NEXT_CLIENT = 11
    SHARE = 12

    HELLO = 32
    READY = 33
    RESULT = 34
    ERROR = 35
    CANCELLED = 36
    ITEM = 37
    END = 38
    EXITED = 39
    PING = 40
    PREPARED = 41

    RECEIVED = 48

    BATCH = 64


class LaunchRequest(msgspec.Struct, frozen=True, array_like=True):
    """Requests a process from a host, in which an actor can then be built."""

    name: str
    process: ChildProcess
    client_key: str
    """Public key of the only peer that the process may accept."""
    takeover: Takeover | None = None


class NextClient(msgspec.Struct, frozen=True, array_like=True):
    """The next client of a process whose client was lost."""

    actor_id: int
    client_key: str


class PrepareRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks a host to check an interpreter and to start a fork server, before the first launch."""

    process: ChildProcess


class SpawnRequest(msgspec.Struct, frozen=True, array_like=True):
    """The class to build.

    The constructor's arguments follow as a second SPAWN message, whose type depends on this one.
    """

    target: str
    fingerprint: str
    mailbox: int
    """Largest number of unanswered calls that the caller sends; more are rejected."""


class ProcessStart(msgspec.Struct, frozen=True, array_like=True):
    """Payload of HELLO, sent by a new process, and of READY, sent by its actor."""

    pid: int
    port: int = 0
    """TCP port at which a process on another host waits for its client; 0 at home."""
    public_key: str = ""
    """Key by which the client recognises the process at that port."""


class ActorReference(msgspec.Struct, frozen=True, array_like=True):
    """Stands for a handle in a message: the actor's class, and the way to it of one holder."""

    target: str
    fingerprint: str
    name: str
    host: str
    """Address of the actor's machine, without a port; empty for the machine of who sends it."""
    port: int
    public_key: str
    keys: KeyPair
    """Those of the holder, whose public one is the only one that the actor accepts at this port."""


class HasReference:
    """Base of objects that a message carries as an `ActorReference`."""

    __slots__ = ()

    def __reference__(self) -> ActorReference:
        """Return it. Raises: TypeError if the object cannot be sent."""
        raise NotImplementedError


class ExitNotice(msgspec.Struct, frozen=True, array_like=True):
    """A host reports the end of one of its actors.

    Example:
        ExitNotice(pid=4711, cause="SIGSEGV", stderr_tail=("EGL: no device",))
    """

    pid: int
    cause: str
    stderr_tail: tuple[str, ...]
    frozen: bool = False


def unpack_envelope(head: Any) -> tuple[int, int, int, int]:
    """Return `(kind, method, actor, call)`. Raises: MalformedMessage."""
    if len(head) < ENVELOPE_SIZE:
        raise MalformedMessage(f"message of {len(head)} bytes, expected at least {ENVELOPE_SIZE}.")
    magic, kind, method, _, actor, call = ENVELOPE.unpack_from(head)
    if magic != MAGIC:
        raise MalformedMessage(f"message begins with {magic:#x}, expected {MAGIC:#x}.")
    return kind, method, actor, call


def num_announced_frames(head: Any) -> int:
    """Return the number of frames that a first frame announces; 0 if it is not ours."""
    return (
        _NUM_FRAMES.unpack_from(head, 4)[0]
        if len(head) >= ENVELOPE_SIZE and head[0] == MAGIC
        else 0
    )


BATCH_KIND = int(Kind.BATCH)
MOST_IN_BATCH = 16
"""A full batch is sent at once, so that the other side begins while this one is still working."""
BATCHED_BELOW = 4096
_LENGTH = struct.Struct("<I")
_MAX_BATCH_BYTES = ENVELOPE_SIZE + MOST_IN_BATCH * (_LENGTH.size + BATCHED_BELOW)
_BATCH_HEAD = ENVELOPE.pack(MAGIC, Kind.BATCH, 0, 0, 0, 0)


def join_messages(messages: Sequence[bytes]) -> bytes:
    """Join several single-frame messages into one BATCH."""
    parts = [_BATCH_HEAD]
    for message in messages:
        parts += (_LENGTH.pack(len(message)), message)
    return b"".join(parts)


def is_batch(head: Any) -> bool:
    """Return whether a first frame holds several messages."""
    return len(head) >= ENVELOPE_SIZE and head[1] == Kind.BATCH and head[0] == MAGIC


def split_messages(batch: Any) -> list[memoryview]:
    """Split a BATCH into its messages.

    Raises: MalformedMessage if `join_messages` did not make it from small messages.
    """
    view, position = memoryview(batch), ENVELOPE_SIZE
    messages: list[memoryview] = []
    end = len(view)
    # A batch of empty messages costs its sender one send, and us a call for each message.
    if end > _MAX_BATCH_BYTES:
        raise MalformedMessage(f"batch of {end} bytes, expected at most {_MAX_BATCH_BYTES}.")
    for _ in range(MOST_IN_BATCH):
        if position >= end:
            return messages
        begin = position + _LENGTH.size
        if begin > end:
            raise MalformedMessage("batch that ends within a length.")
        position = begin + _LENGTH.unpack_from(view, position)[0]
        if position > end:
            raise MalformedMessage(f"batch that ends within a message of {position - begin} bytes.")
        messages.append(view[begin:position])
    if position < end:
        raise MalformedMessage(f"batch of more than {MOST_IN_BATCH} messages.")
    return messages


PART_BYTES = 1 << 18
"""Large enough for a camera image, and for a frame's cost to be small compared with its
encryption."""

MAX_WIRE_FRAME_BYTES = PART_BYTES + 256
"""Largest frame that a socket accepts: a part, and the bytes that CURVE adds to it."""


def num_parts(num_bytes: int) -> int:
    """Return the number of frames for this many bytes."""
    return num_bytes // PART_BYTES + 1


def split_frames(frames: Sequence[Any]) -> list[Any]:
    """Cut frames of at least `PART_BYTES` into parts. The bytes are not copied."""
    return [part for frame in frames for part in _split_frame(frame)]


def join_frames(frames: Frames) -> Frames:
    """Join the frames that `split_frames` cut.

    Parts in a list are dropped as they are joined: a message never takes twice its size.

    Raises: MalformedMessage if a last part is missing, or a frame is too large.
    """
    # Nearly every message: a look at the lengths is all that parts cost the others.
    if not any(len(frame) == PART_BYTES for frame in frames):
        return frames
    joined: list[Any] = []
    joining: bytearray | None = None
    for index, frame in enumerate(frames):
        if joining is None and len(frame) != PART_BYTES:
            joined.append(frame)
            continue
        joining = bytearray() if joining is None else joining
        joining += frame
        if len(joining) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"a frame of more than {MAX_MESSAGE_BYTES} bytes.")
        # Else a message of 1 GiB takes 2 GiB while it is joined.
        if isinstance(frames, list):
            frames[index] = b""
        if len(frame) != PART_BYTES:
            joined.append(memoryview(joining).toreadonly())
            joining = None
    if joining is not None:
        num_parts = len(joining) // PART_BYTES
        raise MalformedMessage(f"a frame whose last part is missing, after {num_parts} parts.")
    return joined


def _split_frame(frame: Any) -> Iterator[Any]:
    if len(frame) < PART_BYTES:
        yield frame
        return
    view = memoryview(frame)
    # One beyond the end: a frame that is a multiple of the size needs an empty last part.
    for begin in range(0, len(view) + 1, PART_BYTES):
        yield view[begin : begin + PART_BYTES]


OnMessage = Callable[[Frames], None]


class ListenSettings(msgspec.Struct, frozen=True):
    """Address at which a process waits for the client that launched it from another host.

    Example:
        ListenSettings(interface="10.0.0.12", ports=(7100, 7199), client_key="...", takes_over=True)
    """

    interface: str
    """Numeric address to bind to."""
    ports: tuple[int, int]
    """First and last port to choose from; (0, 0) for any free one."""
    client_key: str
    """Public key of the only peer that is accepted."""
    takes_over: bool = False
    """Whether the process waits for another client if it loses this one."""


class ChildSettings(msgspec.Struct, frozen=True):
    """Settings of a child process, and how it reaches its parent."""

    name: str
    actor_id: int
    address: str
    parent_pid: int
    sys_path: list[str] | None
    """None keeps that of the interpreter."""
    arena_in: int
    """File descriptor of the arena that the child reads; -1 without shared memory."""
    arena_out: int
    heartbeat: int
    """File descriptor of the page with the child's heartbeat; -1 if it is not observed."""
    listens: ListenSettings | None = None
    """Given by a host: messages go to and from the client directly. None at home, where they go
    through `address`."""

    @property
    def shared_fds(self) -> dict[str, int]:
        """Descriptors of memory that the child shares with its parent, by their field."""
        fds = {"arena_in": self.arena_in, "arena_out": self.arena_out, "heartbeat": self.heartbeat}
        return {field: fd for field, fd in fds.items() if fd >= 0}
