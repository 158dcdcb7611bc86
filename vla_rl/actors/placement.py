"""Placements of actors and restart policies: plain values given to `spawn`."""

import functools
from typing import Any, Final

import msgspec

_MIB = 1 << 20
LOST_AFTER_S: Final = 1.2
FROZEN_AFTER_S: Final = 2.0
LEAST_FROZEN_AFTER_S: Final = 1.0
HIGHEST_PORT: Final = 65535
_PREPARATION_MARGIN_S: Final = 90.0
"""Time for what a host does besides the preparation: it asks an interpreter for a minute at most."""

_KEY_CHARACTERS: Final = 40
_Z85: Final = (
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
)


class InLoop(msgspec.Struct, frozen=True, kw_only=True):
    """In the caller's own loop. Messages are copied by the same rules as in any other placement.

    Constructor arguments are passed by reference, so an actor here may hold handles, engines and
    open files.
    """


class PrepareHook(msgspec.Struct, frozen=True):
    """A function that a fork server calls before its first fork.

    All children share the memory that it leaves.
    """

    function: str
    """`module:function`; it is called once, and must not start threads, an event loop or OpenGL."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of the function, as plain values."""


class ForkServer(msgspec.Struct, frozen=True, kw_only=True):
    """A clean process that imports and prepares once, and is forked for each child that names it.

    A runtime starts one server for each distinct value of this (and of `ChildProcess.python`), with
    the first of its children. The server never has a thread, a loop or a ZeroMQ socket, and refuses
    to fork if a hook left it with a thread.
    """

    imports: tuple[str, ...] = ()
    """Modules that the children need; imported before the hooks."""

    prepare: tuple[PrepareHook, ...] = ()
    """Called in order; `spawn` raises what one of them raises."""

    env: dict[str, str] = {}
    """Variables set on top of this process's environment before the server starts: libraries read
    them when loaded."""

    prepare_timeout_s: float = 300.0
    """Time within which the server must be ready (s, > 0); after that it is killed."""

    def __post_init__(self) -> None:
        if not self.prepare_timeout_s > 0:
            raise ValueError(
                f"prepare_timeout_s is {self.prepare_timeout_s}, expected > 0 seconds."
            )


class ChildProcess(msgspec.Struct, frozen=True, kw_only=True):
    """In a separate process on this host that is killed with this one.

    It is a fresh interpreter, or a fork of a clean one.
    """

    env: dict[str, str] = {}
    """Variables set on top of this process's environment, e.g. `{"OMP_NUM_THREADS": "1"}`. A forked
    child gets them after the fork, when libraries loaded by its server have already read theirs:
    see `ForkServer.env`."""

    python: str | None = None
    """Another interpreter, such as that of another virtual environment, with vla_rl installed; None
    for this one. It finds modules by itself and by PYTHONPATH: this process's `sys.path` is not
    passed on."""

    fork_from: ForkServer | None = None
    """Server to fork the process from; None starts a fresh interpreter."""

    shared_memory_mib: int = 256
    """Largest shared memory in each direction (MiB), for arrays from 16 KiB on; 0 sends all arrays
    through the socket. Pages take memory only once they are used. Arrays that do not fit go through
    the socket."""

    frozen_after_s: float | None = FROZEN_AFTER_S
    """A process that a signal has stopped for this long (s, at least 1) is killed as frozen; so is
    one that sleeps for five times as long without a due heartbeat (see `vla_rl.actors.processes.liveness`).
    None leaves both cases to the calls' deadlines. A fork server is observed with the value of the
    placement that started it."""

    def __post_init__(self) -> None:
        if self.shared_memory_mib < 0:
            raise ValueError(
                f"shared_memory_mib is {self.shared_memory_mib}, expected >= 0; 0 sends all "
                "arrays through the socket."
            )
        if self.frozen_after_s is not None and not self.frozen_after_s >= LEAST_FROZEN_AFTER_S:
            raise ValueError(
                f"frozen_after_s is {self.frozen_after_s}, expected >= {LEAST_FROZEN_AFTER_S:g} "
                "second, in which a process is looked at more than once; None leaves frozen "
                "processes to the calls' deadlines."
            )

    @property
    def needs_preparation(self) -> bool:
        """Whether something has to be checked or started before the first such process."""
        return self.python is not None or self.fork_from is not None

    @property
    def most_preparation_s(self) -> float:
        """Longest time in which a host that is not stuck has prepared such processes (s)."""
        own_s = self.fork_from.prepare_timeout_s if self.fork_from is not None else 0.0
        return own_s + _PREPARATION_MARGIN_S

    @property
    def arena_bytes(self) -> int:
        """Shared memory in each direction, in bytes."""
        return self.shared_memory_mib * _MIB


def require_silence(lost_after_s: float) -> None:
    """Raise ValueError if `lost_after_s` is out of range."""
    if not 0.1 <= lost_after_s <= 3600.0:
        raise ValueError(f"lost_after_s is {lost_after_s}, expected 0.1 to 3600 seconds.")


def is_key(text: str) -> bool:
    """Return whether a text is a CURVE key in ZeroMQ's Z85 form, which ZeroMQ accepts."""
    return len(text) == _KEY_CHARACTERS and all(
        0 <= _parse_group(text[begin : begin + 5]) < 1 << 32
        for begin in range(0, _KEY_CHARACTERS, 5)
    )


def _parse_group(group: str) -> int:
    """Return the number that five characters of Z85 stand for; negative for any others."""
    found = [_Z85.find(each) for each in group]
    return -1 if -1 in found else functools.reduce(lambda number, each: number * 85 + each, found)


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """A CURVE key pair in ZeroMQ's Z85 text form, made by `make_keys`."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=...)"


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """Lets a process on another host outlive its client, for the next client of the same owner.

    Calls of the lost client are cancelled, and the actor keeps its state.
    """

    owner: str
    """Name of the owner, such as a run. Processes of another owner that wait are killed
    once one of this owner is launched there: they hold memory that it may need."""

    name: str
    """Name among the owner's processes on one host."""

    within_s: float
    """Time for the next client to come (s, > 0); after that the process is killed."""

    def __post_init__(self) -> None:
        if not self.within_s > 0:
            raise ValueError(
                f"within_s is {self.within_s}, expected > 0 seconds; leave takeover out for a "
                "process that ends with its client."
            )


class RemoteHost(msgspec.Struct, frozen=True, kw_only=True):
    """In a process of another host that runs `python -m vla_rl.actors.host`.

    Encrypted; only known keys are accepted. The server starts the process and reports its end; all
    other messages travel between the process and us, on a connection of their own.
    """

    address: str
    """`tcp://host:port` of the server."""

    server_public_key: str
    """The server's public key, which proves its identity."""

    client_keys: KeyPair
    """Our keys; the public one must be among those that the server allows."""

    process: ChildProcess = ChildProcess()
    """Process to start there: its interpreter, its fork server, its environment on top of the
    server's. Paths are those of the host. `shared_memory_mib` has no meaning between hosts."""

    env: dict[str, str] = {}
    """Short for `process=ChildProcess(env=...)`; refused beside a process with variables."""

    lost_after_s: float = LOST_AFTER_S
    """Silence after which the host counts as lost (s, 0.1 to 3600). ZeroMQ's threads exchange
    heartbeats at a third of this interval, even while their processes are busy; raise it for
    machines that may stand still for seconds."""

    takeover: Takeover | None = None
    """Take over the process that waits under this name, if there is one, instead of starting one;
    and let it wait if we are lost. None: a process that ends with us."""

    def __post_init__(self) -> None:
        require_silence(self.lost_after_s)
        if not self.address.startswith("tcp://"):
            raise ValueError(
                f"address is {self.address!r}, expected tcp://host:port of a "
                "vla_rl.actors.host server."
            )
        if self.env and self.process.env:
            raise ValueError(
                f"env is {self.env} and process.env is {self.process.env}, expected one of them; "
                "put all variables into process.env."
            )
        if self.takeover is not None and self.process.fork_from is not None:
            raise ValueError(
                "a forked process cannot be taken over, because its fork server ends with its "
                "client; leave out takeover or process.fork_from."
            )

    @property
    def host(self) -> str:
        """Address of the machine, without scheme and port."""
        return self.address.removeprefix("tcp://").rpartition(":")[0]

    @property
    def launched_process(self) -> ChildProcess:
        """Process to start there, with the variables of either field."""
        if not self.env:
            return self.process
        return msgspec.structs.replace(self.process, env=self.env)


Placement = InLoop | ChildProcess | RemoteHost


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Replace an actor that died or froze, up to a limit: one restart too many ends the runtime."""

    max_restarts: int = 3
    within_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or not self.within_s > 0:
            raise ValueError(
                f"max_restarts={self.max_restarts} within_s={self.within_s}, expected >= 0 "
                "restarts in > 0 seconds; leave the policy out for an actor that stays dead."
            )


class Intensity:
    """Counts restarts in a sliding window."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts_s: list[float] = []

    def admit_restart(self, now_s: float) -> bool:
        """Return whether one more restart is within the policy; count it if so."""
        self._restarts_s = [
            then for then in self._restarts_s if now_s - then < self._policy.within_s
        ]
        if len(self._restarts_s) >= self._policy.max_restarts:
            return False
        self._restarts_s.append(now_s)
        return True
