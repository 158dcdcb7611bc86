"""Assign environments to episodes: a plain class with no task and no clock, driven by the pool.

A place in a process that has already built the environment of an episode saves its set-up, often
seconds. So an episode prefers such a place, and a free place prefers such an episode; but no
request is passed over more than `patience` times.
"""

from collections import deque
from typing import Generic, TypeVar

from vla_rl.types import EnvSpec

Env = TypeVar("Env")
Request = TypeVar("Request")


class Assignment(Generic[Env, Request]):
    """Idle environments on one side, waiting requests on the other.

    At any time at least one side is empty.

    Args:
        patience: how often the oldest request may be passed over by a younger one that fits the
            free environment.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._idle: list[tuple[Env, EnvSpec | None]] = []
        self._waiting: deque[tuple[Request, EnvSpec]] = deque()
        self._passed_over = 0

    @property
    def num_idle(self) -> int:
        """Number of environments that wait for a request."""
        return len(self._idle)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for an environment."""
        return len(self._waiting)

    def ask(self, request: Request, spec: EnvSpec) -> Env | None:
        """Take an environment for the request.

        It is one that holds `spec`, else an empty one, else the longest idle.

        Return None if all are busy; `offer` then returns the request when its turn has come.
        """
        if not self._idle:
            self._waiting.append((request, spec))
            return None
        held = [environment for _, environment in self._idle]
        wanted = spec if spec in held else None
        index = held.index(wanted) if wanted in held else 0
        return self._idle.pop(index)[0]

    def offer(self, env: Env, held: EnvSpec | None) -> Request | None:
        """Return the waiting request for a free environment and remove it from the list.

        None keeps the environment idle.
        """
        if not self._waiting:
            self._idle.append((env, held))
            return None
        index = self._best_fit(held) if self._passed_over < self._patience else 0
        self._passed_over = 0 if index == 0 else self._passed_over + 1
        request, _ = self._waiting[index]
        del self._waiting[index]
        return request

    def withdraw(self, request: Request) -> None:
        """Remove a request that no longer waits from the list."""
        waiting = next((entry for entry in self._waiting if entry[0] is request), None)
        if waiting is not None:
            self._waiting.remove(waiting)

    def withdraw_all(self) -> list[Request]:
        """Remove all waiting requests from the list."""
        requests = [request for request, _ in self._waiting]
        self._waiting.clear()
        return requests

    def _best_fit(self, held: EnvSpec | None) -> int:
        return next((index for index, (_, spec) in enumerate(self._waiting) if spec == held), 0)
