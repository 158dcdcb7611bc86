"""Handles: objects with the methods of an actor that messages can call.

Typed as the actor's class, so that editors and mypy know them.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from vla_rl.actors.actor import Actor, ActorMethod, table_of
from vla_rl.actors.client import ActorClient


class Handle:
    """Reference to one actor. Made by `Runtime.spawn`; copies nothing, owns nothing."""

    __slots__ = ("__weakref__", "_client", "_record")
    actor_class: type[Actor]

    def __init__(self, client: ActorClient, record: object) -> None:
        self._client, self._record = client, record

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
    methods = {entry.name: _method(entry) for entry in table_of(actor_class).methods}
    namespace = {
        "__slots__": (),
        "__doc__": actor_class.__doc__,
        "actor_class": actor_class,
        **methods,
    }
    return type(f"{actor_class.__name__}Handle", (Handle,), namespace)


def client_of(handle: object) -> ActorClient:
    """Return the client behind a handle. Raises: TypeError for any other object."""
    if not isinstance(handle, Handle):
        raise TypeError(f"{handle!r} is not a handle; use what Runtime.spawn returned.")
    return handle._client


def record_of(handle: object) -> object:
    """Return what the runtime stores about the actor of a handle."""
    return handle._record if isinstance(handle, Handle) else None


def _method(entry: ActorMethod) -> Callable[..., Any]:
    if entry.is_stream:

        def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
            return self._client.stream(entry, args, kwargs)
    else:

        def method(self: Handle, *args: Any, **kwargs: Any) -> Any:
            return self._client.call(entry, args, kwargs)

    method.__name__, method.__qualname__ = entry.name, entry.label
    return method
