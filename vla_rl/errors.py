"""Errors that a supervisor, a scheduler or a user has to distinguish.

Plain mistakes of a caller raise built-in exceptions.

The errors and their causes:
    `ActorDied`, `ActorFrozen`   a process is gone; the scheduler runs the episode again, the pool
                                 replaces the process
    `RemoteError`                an application exception whose class the caller cannot import, with
                                 the remote traceback
    `RankFailed`                 a process of a sharded learner is gone or failed; the run starts
                                 again from its newest checkpoint
    `WeightsNotGiven`            weights that a host could not take from the processes that hold
                                 them; they go through the control process instead
    `EnvError`                   an environment that breaks its contract; never retried, the run
                                 ends with this error
    `AssetError`                 a mesh, a texture or a scene that an environment needs and that is
                                 not there; an `EnvError` and a `FileNotFoundError`
    `StartError`                 an episode has no such start, because what has to happen before it did not;
                                 an `EnvError`
    `PackageError`               a package that an environment needs and that is not installed; an
                                 `EnvError` and an `ImportError`
    `AgentError`                 an agent that breaks its contract, such as one that returns no
                                 trajectory
    `ConfigError`                a configuration rejected before anything starts
    `GraphError`                 a graph rejected when it is built, or a node that broke its
                                 declaration
    `ConservationError`          an episode was lost or counted twice; only a bug in vla_rl can
                                 raise it
    `CheckpointError`            a checkpoint that is incomplete, or could not be written
    `DataError`                  a data set with a missing or wrong field; names the file, the
                                 episode and the field
    `ContextOverflow`            a prompt that leaves a language policy no room for a reply
    `ConversationRejected`       a conversation that a language policy's chat template rejects
"""

from collections.abc import Sequence


class VlaRlError(Exception):
    """Base class of all errors of vla_rl."""


class ActorDied(VlaRlError):
    """The process or host of an actor is gone: all pending and later calls raise this.

    Args:
        name: the actor's name, as given to `spawn`.
        pid: operating-system id of the process that died; 0 if there was none (an actor in this
            loop).
        cause: `"exit code 3"`, `"SIGKILL"`, `"host unreachable for 2.0 s"`, or the error its
            constructor raised.
        stderr_tail: the last lines that it wrote to stderr, oldest first.
    """

    def __init__(self, name: str, pid: int, cause: str, stderr_tail: Sequence[str] = ()) -> None:
        self.name, self.pid, self.cause, self.stderr_tail = name, pid, cause, tuple(stderr_tail)
        words = "".join(f"\n    {line}" for line in self.stderr_tail)
        super().__init__(
            f"actor {name!r} (pid "
            f"{pid}) died: {cause}" + (f"; the end of its stderr:{words}" if words else "")
        )


class ActorFrozen(ActorDied):
    """A live process froze, or did not answer before its deadline.

    It was killed, so no answer can come later.
    """


class RankFailed(VlaRlError):
    """A rank of a sharded learner died, froze or failed; all ranks were ended."""

    @staticmethod
    def found_in(error: BaseException) -> "RankFailed | None":
        """Return the failure of a rank that an error is, holds as a group, or was caused by."""
        if isinstance(error, RankFailed):
            return error
        inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
        for each in (*inside, error.__cause__):
            if each is not None and (found := RankFailed.found_in(each)) is not None:
                return found
        return None


class RankNotStarted(RankFailed):
    """A rank of a sharded learner died or failed while it started; all ranks were ended.

    Args:
        message: names the rank and the cause.
        rank: its number.
        host: name of its host; empty for this one.
    """

    def __init__(self, message: str, rank: int, host: str = "") -> None:
        self.rank, self.host = rank, host
        super().__init__(message)


class LearnerHostLost(RankFailed):
    """A host on which ranks of a sharded learner were is gone.

    Args:
        message: names the host.
        host: its name.
    """

    def __init__(self, message: str, host: str) -> None:
        self.host = host
        super().__init__(message)


class WeightsNotGiven(VlaRlError):
    """A host could not take weights from the processes that hold them."""


class HostNotReached(WeightsNotGiven):
    """A process that holds weights cannot connect to a host, and a second attempt would not help."""


class RemoteError(VlaRlError):
    """An exception of an actor's own code whose class is unknown here.

    Holds its name, text and remote traceback.
    """

    def __init__(self, type_name: str, message: str, remote_traceback: str = "") -> None:
        self.type_name, self.message, self.remote_traceback = type_name, message, remote_traceback
        super().__init__(f"{type_name}: {message}")


class EnvError(VlaRlError):
    """An environment raised an error, or returned a value that its declared spaces do not allow."""


class StartError(EnvError):
    """An episode has no such start: what has to happen in the scene before it did not."""


class AssetError(EnvError, FileNotFoundError):
    """A mesh, a texture or a scene that an environment needs is not there."""


class PackageError(EnvError, ImportError):
    """A package that an environment needs is not installed."""


class AgentError(VlaRlError, ValueError):
    """An agent that is not async, misuses what it is given, or returns another trajectory."""


class ConfigError(VlaRlError, ValueError):
    """A configuration value that is unknown, out of range, or incompatible with another."""


class GraphError(VlaRlError, ValueError):
    """A graph that cannot run, or a node that violated its declaration."""


class ConservationError(VlaRlError):
    """Dispatched episodes are not trained + filtered + dropped + in flight + buffered."""


class CheckpointError(VlaRlError):
    """A checkpoint that is incomplete, of another format, or could not be written."""


class DataError(VlaRlError):
    """A data set with a missing or wrong field; names the file, the episode and the field."""


class PolicyError(VlaRlError):
    """A policy that returns NaN, infinity or impossible log-probs.

    Names the weight version and the episode.
    """


class ContextOverflow(VlaRlError, ValueError):
    """A prompt that leaves no room for a reply.

    Args:
        num_tokens: tokens of the prompt.
        context_size: most tokens of prompt and reply together.
    """

    def __init__(self, num_tokens: int, context_size: int) -> None:
        self.num_tokens, self.context_size = num_tokens, context_size
        super().__init__(
            f"the prompt has {num_tokens} tokens and the context {context_size}, expected room for "
            "at least one token of a reply; shorten the conversation, or use a policy (or an "
            "engine) with a longer context"
        )


class ConversationRejected(VlaRlError, ValueError):
    """A conversation that a language policy's chat template rejects.

    Args:
        message: names the roles and what the template raised.
        is_reply_at_fault: whether the template takes the same conversation with plain replies, so
            that the policy's own replies are the cause; if not, it is what others wrote.
    """

    def __init__(self, message: str, *, is_reply_at_fault: bool) -> None:
        self.is_reply_at_fault = is_reply_at_fault
        super().__init__(message)
