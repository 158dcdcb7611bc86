"""Handles: objects with the methods of an actor that messages can call.

They are typed as the actor's class, so that editors and mypy know them. For one actor's answer use
`await actor.method(...)`. The functions below call several actors, or do not wait for the answer:
`await call_all(counters, Counter.add, 2)`. Their `method` is the method of the class, so that mypy
checks the arguments.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from vla_rl.actors.calls.actor import Actor, ActorMethod, get_method_table
from vla_rl.actors.calls.client import ActorClient
from vla_rl.actors.wire.envelope import ActorReference, HasReference


class Handle(HasReference):
    """Reference to one actor. Made by `Runtime.spawn`; copies nothing, owns nothing."""

    __slots__ = ("__weakref__", "_client", "_record")
    actor_class: type[Actor]

    def __init__(self, client: ActorClient, record: object) -> None:
        self._client, self._record = client, record

    def __reference__(self) -> ActorReference:
        """Return what a message carries. Raises: TypeError if this handle stays here."""
        return self._client.make_reference()

    def __repr__(self) -> str:
        client = self._client
        return (
            f"<{self.actor_class.__name__} {client.name!r}, {client.state.value}, pid {client.pid}>"
        )

    def __getattr__(self, name: str) -> NoReturn:
        kind = self.actor_class.__name__
        if hasattr(self.actor_class, name):
            raise AttributeError(
                f"{kind}.{name} is no actor method: a handle can only call public async methods."
            )
        raise AttributeError(f"{kind} has no method {name!r}.")


_classes: dict[type[Actor], type[Handle]] = {}


def handle_class(actor_class: type[Actor]) -> type[Handle]:
    """Return the handle class of an actor class, made once."""
    if actor_class not in _classes:
        _classes[actor_class] = _make_class(actor_class)
    return _classes[actor_class]


def _make_class(actor_class: type[Actor]) -> type[Handle]:
    methods = {entry.name: _make_method(entry) for entry in get_method_table(actor_class).methods}
    namespace = {
        "__slots__": (),
        "__doc__": actor_class.__doc__,
        "actor_class": actor_class,
        # what a signature declares as an actor is checked with `isinstance` where a message is read
        "__class__": property(lambda self: actor_class),
        **methods,
    }
    return type(f"{actor_class.__name__}Handle", (Handle,), namespace)


def get_client(handle: object) -> ActorClient:
    """Return the client behind a handle. Raises: TypeError for any other object."""
    if not isinstance(handle, Handle):
        raise TypeError(f"{handle!r} is not a handle; use what Runtime.spawn returned.")
    return handle._client


def get_record(handle: object) -> object:
    """Return what the runtime stores about the actor of a handle."""
    return handle._record if isinstance(handle, Handle) else None


def _make_method(entry: ActorMethod) -> Callable[..., Any]:
    if entry.is_stream:

        def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
            return self._client.iterate(entry, args, kwargs)
    else:

        def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
            return self._client.call_method(entry, args, kwargs)

    method.__name__, method.__qualname__ = entry.name, entry.label
    return method


A = TypeVar("A", bound=Actor)
P = ParamSpec("P")
R = TypeVar("R")
Method = Callable[Concatenate[A, P], Coroutine[Any, Any, R]]


async def call_all(
    actors: Sequence[A], method: Method[A, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> list[R]:
    """Call all actors; return the answers in the order of `actors`.

    The first error cancels the other calls.
    """
    tasks = _start_calls(actors, method, args, kwargs)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in _failed_first(tasks)]
    finally:
        await _cancel_calls(tasks)


async def call_any(
    actors: Sequence[A], method: Method[A, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """Call all actors; return the first answer and cancel the other calls.

    An error counts only if all actors failed; then the last one is raised.
    """
    # a task for each call: cancelling it is what tells the actor to stop working on it
    tasks = _start_calls(actors, method, args, kwargs)
    waiting = set(tasks)
    try:
        while True:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled() and task.exception() is None:
                    return task.result()
            if not waiting:
                return done.pop().result()
    finally:
        await _cancel_calls(tasks)


async def call_as_completed(
    actors: Sequence[A], method: Method[A, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> AsyncIterator[tuple[A, R]]:
    """Call all actors; yield `(actor, answer)` as they come.

    The first error, or leaving the loop, cancels the others.
    """
    tasks = _start_calls(actors, method, args, kwargs)
    actor_by_task = dict(zip(tasks, actors, strict=True))
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    yield actor_by_task[task], task.result()
    finally:
        await _cancel_calls(tasks)


def begin_call(
    actor: A, method: Method[A, P, R], /, *args: P.args, **kwargs: P.kwargs
) -> Awaitable[R]:
    """Send a call now and await its answer later, without a task per call.

        answers = [begin(worker, EnvWorker.step, action, 0) for worker, action in zip(workers, actions)]
        for answer in answers: await answer

    Each result must be awaited. A call that cannot be sent now (the mailbox is full, the actor is
    restarting) is sent when it is awaited. Unlike with a plain call, a cancellation is not passed
    on to the actor.
    """
    client, entry = _resolve(actor, method)
    return client.begin_call(entry, args, kwargs)


async def tell(actor: A, method: Method[A, P, R], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Send a call without waiting for an answer; waits only while the mailbox is full.

    The method's result is dropped; an exception that it raises is logged.
    """
    client, entry = _resolve(actor, method)
    await client.send_call(entry, args, kwargs)


def _start_calls(
    actors: Sequence[A], method: Method[A, P, R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list["asyncio.Task[R]"]:
    if not actors:
        raise ValueError("no actors to call, expected at least one.")
    targets = [_resolve(actor, method) for actor in actors]
    return [
        asyncio.create_task(
            client.call_method(entry, args, kwargs), name=f"{client.name}.{entry.name}"
        )
        for client, entry in targets
    ]


async def _cancel_calls(tasks: list["asyncio.Task[R]"]) -> None:
    """Cancel the remaining tasks and retrieve all outcomes: asyncio reports none as lost."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _failed_first(tasks: list["asyncio.Task[R]"]) -> list["asyncio.Task[R]"]:
    """Return the failed tasks if there are any, since others may have no result; else all."""
    failed = [
        task for task in tasks if task.done() and (task.cancelled() or task.exception() is not None)
    ]
    return failed or tasks


def _resolve(actor: object, method: Callable[..., Any]) -> tuple[ActorClient, ActorMethod]:
    client = get_client(actor)
    name = getattr(method, "__name__", repr(method))
    entry = client.table.by_name.get(name)
    if entry is None or entry.is_stream:
        kind = client.table.actor_class.__name__
        raise TypeError(
            f"{name} is not a method of {kind} that answers once; name one as {kind}.method."
        )
    return client, entry
