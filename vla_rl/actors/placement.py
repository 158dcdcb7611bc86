"""Where an actor runs, and what happens when it dies: plain values given to `spawn`."""

from typing import Any, Final

import msgspec

_MIB = 1 << 20
LOST_AFTER_S: Final = 1.2
FROZEN_AFTER_S: Final = 2.0
LEAST_FROZEN_AFTER_S: Final = 1.0


class InLoop(msgspec.Struct, frozen=True, kw_only=True):
    """In the caller's own loop. Messages are copied by the same rules as anywhere else.

    Constructor arguments are handed over as they are, so an actor here may hold handles, engines and open files.
    """


class PrepareHook(msgspec.Struct, frozen=True):
    """A function that a fork server calls before its first fork: what it leaves in memory, all children share."""

    function: str
    """`module:function`; it is called once, and starts no threads, no event loop and no OpenGL."""

    kwargs: dict[str, Any] = {}
    """Plain values."""


class ForkServer(msgspec.Struct, frozen=True, kw_only=True):
    """A clean process that imports and prepares once, and is forked for each child that names it.

    There is one in a runtime for equal values of this (and of `ChildProcess.python`), started with the first of its
    children. It never has a thread, a loop or a socket of ZeroMQ, and refuses to fork where a hook left it with a thread.
    """

    imports: tuple[str, ...] = ()
    """Modules that the children need; imported before the hooks."""

    prepare: tuple[PrepareHook, ...] = ()
    """Called one after the other; what one of them raises is raised by `spawn`."""

    env: dict[str, str] = {}
    """Set on top of this process's environment before the server starts: what libraries read when they are loaded."""

    prepare_timeout_s: float = 300.0
    """A server that is not ready after this long is killed."""

    def __post_init__(self) -> None:
        if self.prepare_timeout_s <= 0:
            raise ValueError(f"prepare_timeout_s is {self.prepare_timeout_s}, expected > 0 seconds.")


class ChildProcess(msgspec.Struct, frozen=True, kw_only=True):
    """In a process of its own on this host, killed with this one: a fresh interpreter, or the fork of a clean one."""

    env: dict[str, str] = {}
    """Set on top of this process's environment, e.g. `{"OMP_NUM_THREADS": "1"}`. A forked child gets it after the fork,
    when libraries that its server loaded have read theirs: see `ForkServer.env`."""

    python: str | None = None
    """Another interpreter, such as that of another virtual environment, which has vla_rl installed; None for this one.
    It finds modules by itself and by PYTHONPATH: this process's `sys.path` is not handed on."""

    fork_from: ForkServer | None = None
    """None starts a fresh interpreter."""

    shared_memory_mib: int = 256
    """Largest shared memory in each direction, for arrays from 16 KiB on; 0 sends all arrays through the socket. Pages
    count only once they are used. Arrays that find no room go through the socket."""

    frozen_after_s: float | None = FROZEN_AFTER_S
    """A process that a signal has stopped for this long (s, at least 1) is killed as frozen; so is one that sleeps for five
    times as long although it should beat (see `vla_rl.actors.heartbeat`). None leaves both to the calls' deadlines. A fork
    server is observed as the placement that it was started for."""

    def __post_init__(self) -> None:
        if self.shared_memory_mib < 0:
            raise ValueError(f"shared_memory_mib is {self.shared_memory_mib}, expected >= 0; 0 uses the socket alone.")
        if self.frozen_after_s is not None and not self.frozen_after_s >= LEAST_FROZEN_AFTER_S:
            raise ValueError(
                f"frozen_after_s is {self.frozen_after_s}, expected >= {LEAST_FROZEN_AFTER_S:g} second, in which a process "
                "is looked at more than once; None leaves frozen processes to the calls' deadlines."
            )

    @property
    def arena_bytes(self) -> int:
        """Shared memory in each direction."""
        return self.shared_memory_mib * _MIB


def require_silence(lost_after_s: float) -> None:
    """Raises: ValueError for one after which no connection could be lost, or kept."""
    if not 0.1 <= lost_after_s <= 3600.0:
        raise ValueError(f"lost_after_s is {lost_after_s}, expected 0.1 to 3600 seconds.")


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """A CURVE key pair in ZeroMQ's Z85 text form, made by `make_keys`."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r}, secret=...)"


class RemoteHost(msgspec.Struct, frozen=True, kw_only=True):
    """In a process of another host, where `python -m vla_rl.actors.host` serves. Encrypted; known keys only."""

    address: str
    """`tcp://host:port` of the server."""

    server_public_key: str
    """The server's public key: nobody else can pose as it."""

    client_keys: KeyPair
    """Our keys; the server lists the public one among those that it serves."""

    env: dict[str, str] = {}
    """Set on top of the server's environment."""

    lost_after_s: float = LOST_AFTER_S
    """Silence after which the host is lost (s). ZeroMQ's threads ask each other for a sign of life every third of it, and
    answer however busy their processes are; machines that may stand still for seconds need more."""

    def __post_init__(self) -> None:
        require_silence(self.lost_after_s)
        if not self.address.startswith("tcp://"):
            raise ValueError(f"address is {self.address!r}, expected tcp://host:port of a vla_rl.actors.host server.")


Placement = InLoop | ChildProcess | RemoteHost


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Replace an actor that died or froze, but not for ever: one restart too many ends the runtime."""

    max_restarts: int = 3
    within_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.within_s <= 0:
            raise ValueError(
                f"max_restarts={self.max_restarts} within_s={self.within_s}, expected >= 0 restarts in > 0 seconds; "
                f"leave the policy out for an actor that stays dead."
            )


class Intensity:
    """Counts restarts in a sliding window."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._restarts_s: list[float] = []

    def admit(self, now_s: float) -> bool:
        """Whether one more restart is within the policy; counts it if so."""
        self._restarts_s = [then for then in self._restarts_s if now_s - then < self._policy.within_s]
        if len(self._restarts_s) >= self._policy.max_restarts:
            return False
        self._restarts_s.append(now_s)
        return True
