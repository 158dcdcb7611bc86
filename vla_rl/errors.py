"""Faults that a supervisor, a scheduler or a user tells apart. A caller's plain mistake stays a built-in exception.

Who raises what:
    `ActorDied`, `ActorFrozen`   the runtime; the scheduler replays the episode elsewhere, the pool replaces the process
    `RemoteError`                an application exception whose class the caller cannot name, with the remote traceback
    `EnvError`                   an environment that breaks its contract; never retried, the run ends and says why
    `AgentError`                 an agent that breaks its contract, such as one that returns no trajectory
    `ConfigError`                a configuration refused before anything starts
    `GraphError`                 a graph refused when it is built, or a node that broke its declaration
    `ConservationError`          an episode was lost or counted twice; only a bug of ours can raise it
    `CheckpointError`            a checkpoint that is not whole, or could not be written
    `DataError`                  a data set that is not what was expected; names the file, the episode and the field
    `ContextOverflow`            a prompt that leaves a language policy no room to reply
"""

from collections.abc import Sequence


class VlaRlError(Exception):
    """Base of all errors that vla_rl names."""


class ActorDied(VlaRlError):
    """The process or host of an actor is gone; every pending and later call on its handle raises this.

    Args:
        name: the actor's name, as given to `spawn`.
        pid: operating-system id of the process that died, 0 where there was none (in this loop).
        cause: `"exit code 3"`, `"SIGKILL"`, `"host unreachable for 2.0 s"`, or the error its constructor raised.
        last_words: the last lines it wrote to stderr, oldest first.
    """

    def __init__(self, name: str, pid: int, cause: str, last_words: Sequence[str] = ()) -> None:
        self.name, self.pid, self.cause, self.last_words = name, pid, cause, tuple(last_words)
        words = "".join(f"\n    {line}" for line in self.last_words)
        super().__init__(f"actor {name!r} (pid {pid}) died: {cause}" + (f"; its last words:{words}" if words else ""))


class ActorFrozen(ActorDied):
    """A live process stood still, or did not answer before its deadline; it was killed, so nothing of it answers later."""


class RemoteError(VlaRlError):
    """An exception of an actor's own code whose class is unknown here; carries its name, text and remote traceback."""

    def __init__(self, type_name: str, message: str, remote_traceback: str = "") -> None:
        self.type_name, self.message, self.remote_traceback = type_name, message, remote_traceback
        super().__init__(f"{type_name}: {message}")


class EnvError(VlaRlError):
    """An environment raised, or returned something its declared spaces do not allow."""


class AgentError(VlaRlError, ValueError):
    """An agent that is not async, returns something else than its episode's trajectory, or misuses what it is handed."""


class ConfigError(VlaRlError, ValueError):
    """A configuration value that is unknown, out of range, or infeasible together with another."""


class GraphError(VlaRlError, ValueError):
    """A graph that cannot run, or a node that did not keep to what it declared."""


class ConservationError(VlaRlError):
    """dispatched = trained + filtered + dropped + in flight + buffered does not hold."""


class CheckpointError(VlaRlError):
    """A checkpoint that is incomplete, of another format, or could not be written."""


class DataError(VlaRlError):
    """A data set that lacks something, or holds something else than expected; names the file, the episode and the field."""


class PolicyError(VlaRlError):
    """A policy that answers with what is no number; says which weights, and in which episode."""


class ContextOverflow(VlaRlError, ValueError):
    """A prompt that leaves no room for a reply.

    Args:
        num_tokens: of the prompt.
        context_size: tokens that prompt and reply may have together.
    """

    def __init__(self, num_tokens: int, context_size: int) -> None:
        self.num_tokens, self.context_size = num_tokens, context_size
        super().__init__(
            f"the prompt has {num_tokens} tokens and the context {context_size}, expected room for at least one token of a "
            "reply; shorten the conversation, or take a policy (or an engine) with a longer context"
        )
