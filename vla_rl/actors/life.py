"""The life of an actor over its incarnations, as its callers find it."""

import asyncio
import enum

from vla_rl.errors import ActorDied


class State(enum.Enum):
    """State of an actor, as a call finds it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    DEAD = "dead"


class Life:
    """State of one actor, the error that ended its last incarnation, and the wait for the next one.

    Attributes:
        state: current state.
        error: error that ended the last incarnation; None while one is alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.state = State.STARTING
        self.error: ActorDied | None = None
        self._settled = asyncio.Event()

    def settle(self, state: State, error: ActorDied | None) -> None:
        """Enter a state. Callers that wait for an incarnation go on, except while it restarts."""
        self.state, self.error = state, error
        if state is State.RESTARTING:
            self._settled.clear()
        else:
            self._settled.set()

    async def until_running(self) -> None:
        """Wait for a running incarnation. Raises: ActorDied if there will be none."""
        while self.state is not State.RUNNING:
            if self.state is not State.RESTARTING:
                raise self.death()
            await self._settled.wait()

    def death(self) -> ActorDied:
        """Return a new error that repeats the one which ended the last incarnation."""
        # each caller gets its own: a traceback and notes are added to the error that is raised
        error = self.error
        if error is None:
            return ActorDied(self._name, 0, f"it is {self.state.value}")
        return type(error)(error.name, error.pid, error.cause, error.last_words)

    def last_error(self, why: str, cause: BaseException | None) -> ActorDied:
        """Return the error that ended the last incarnation, and why there is no next one."""
        last = self.death()
        reason = f"{last.cause}; {why}"
        if cause is not None:
            reason += f"; the last restart failed: {cause}"
        return type(last)(self._name, last.pid, reason, last.last_words)
